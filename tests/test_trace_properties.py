"""What holds for any trace and any intervals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.trace.intervals import difference, intersection, length, split, union, within
from telemetry.trace.reader import read_trace
from tests.trace_files import write, x

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (float(p[0]), float(sum(p)))), max_size=9
)


@settings(deadline=None, max_examples=300)
@given(spans, spans, st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_interval_arithmetic_against_sets_of_moments(one, other, window):
    def moments(intervals):
        return {m for start, end in intervals for m in range(int(start), int(end))}

    a, b = union(one), union(other)
    assert moments(a) == moments(one)
    assert all(x[1] < y[0] for x, y in zip(a, a[1:], strict=False))
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    assert [moments(part) for part in split(a, b)] == [moments(a) & moments(b), moments(a) - moments(b)]
    assert moments(within(a, *map(float, sorted(window)))) == moments(a) & set(range(*sorted(window)))
    assert length(difference(a, b)) == len(moments(a) - moments(b))


rows = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation", "cuda_sync"]),
        st.sampled_from(["k", "nccl:all_reduce", "ncclKernel_X", "enumerate(DataLoader)#x.__next__", "ProfilerStep#1",
                         "ProfilerStep#2", "cudaDeviceSynchronize", "aten::copy_", "Optimizer.zero_grad#SGD.zero_grad"]),
        st.integers(0, 200) | st.floats(0, 200), st.integers(0, 80) | st.floats(0, 80),
        st.integers(-1, 5), st.integers(-1, 3), st.integers(-1, 9),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(rows)
def test_whatever_is_in_a_trace_categories_sum_to_the_step(tmp_path_factory, found):
    events = [
        x(cat, name, ts, dur, tid, correlation=correlation, stream=stream, external=correlation)
        for cat, name, ts, dur, correlation, stream, tid in found
    ]
    path = write(tmp_path_factory.getbasetemp(), events)
    try:
        trace = read_trace(path)
    except Exception as error:
        assert type(error).__name__ == "NoTraceError"  # nothing in it lasts
        return
    for each in trace.steps:
        assert sum(each.categories.values()) == pytest.approx(each.seconds, abs=1e-9)
        assert min(each.categories.values()) >= -1e-12
    assert sum(trace.average.categories.values()) == pytest.approx(1)
    assert all(0 <= a.share_ratio <= 1 + 1e-9 for a in trace.advice)
