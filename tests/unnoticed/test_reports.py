"""What the report says of trainings that look like something else."""

from __future__ import annotations

import pytest

from tests.faults.processes import quiet, report, write
from tests.faults.warm_python import warm_python
from tests.unnoticed.pairs import MODULE


def reported(folder, source: str) -> dict:
    """The only rank of the report on a script."""
    env = quiet(TELEMETRY_RUN_DIR=str(folder / "run"))
    done = warm_python(*MODULE, write(folder, "script.py", source), cwd=folder, env=env)
    if (done.returncode, done.stderr) != (0, ""):
        pytest.fail(done.stderr)
    (rank,) = report(folder / "run")["ranks"]
    return rank


def test_pickled_tensors_are_no_checkpoints(tmp_path):
    source = """
        import copy, pickle
        from unnoticed.training import Training, looked_at

        training = Training()
        for _ in looked_at():
            for x in training.loader:
                training.step(x)
                for one in (x, [x.clone()], training.model.state_dict()):
                    pickle.loads(pickle.dumps(one))
                    copy.deepcopy(one)
        """
    assert reported(tmp_path, source)["ledger"]["checkpoint"] == 0


WITHOUT_GRADIENTS = {
    "manual gradients": """
        import torch
        from unnoticed.training import Training, looked_at

        training = Training()
        with torch.no_grad():
            for _ in looked_at():
                for x in training.loader:
                    error = training.model(x) - 1
                    training.model.weight.grad = error.T @ x
                    training.optimizer.step()
        """,
    "an evolution strategy": """
        import torch
        from unnoticed.training import Training, looked_at

        training = Training()
        with torch.inference_mode():
            for _ in looked_at():
                for x in training.loader:
                    before = training.model.weight.clone()
                    noise = torch.randn_like(before)
                    training.model.weight += noise
                    loss = training.model(x).square().sum()
                    training.model.weight.copy_(before)
                    training.model.weight.grad = loss * noise
                    training.optimizer.step()
        """,
    "gradients only inside": """
        import torch
        from unnoticed.training import Training, looked_at

        training = Training()
        torch.set_grad_enabled(False)
        for _ in looked_at():
            for x in training.loader:
                with torch.enable_grad():
                    training.model(x).sum().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        """,
}


@pytest.mark.parametrize("source", WITHOUT_GRADIENTS.values(), ids=WITHOUT_GRADIENTS)
def test_a_training_with_gradients_off_is_no_evaluation(source, tmp_path):
    rank = reported(tmp_path, source)
    assert rank["ledger"]["evaluation"] < rank["ledger"]["compute"]  # what came before the first step


@pytest.mark.parametrize("how", ["'./program', ['program']", "'/bin/true', []", "'/bin/true', ['a' + chr(0)]"])
def test_a_failed_exec_does_not_end_the_run(how, tmp_path):
    source = f"""
        import os
        from unnoticed.training import Training

        training = Training()
        training.epoch()
        with open("program", "w") as file:
            file.write("no program")
        os.chmod("program", 0o755)
        try:
            os.execv({how})
        except (OSError, ValueError):
            training.epoch()
        """
    assert reported(tmp_path, source)["steps"] == 32
