"""Results of specimens for the tests of the zoo."""

from .specimens import Specimen

# -- the judgement ---------------------------------------------------------------------------------------------

STARVED = Specimen("starved", "x", ("workers_cpu_bound",), "")


def stall(cause, *, rank=0, lost=1.0, advice=(), **evidence):
    return {
        "rank": rank,
        "cause": cause,
        "exposed_wait_ratio": 0.5,
        "evidence": {"lost_seconds": {cause: lost}, **evidence},
        "advice": list(advice),
    }


def more_workers(predicted):
    return {"action": "", "setting": "num_workers", "value": "4", "predicted_speedup": predicted, "because": ""}
