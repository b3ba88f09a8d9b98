"""`measure` counts the allocator's bytes exactly, whoever allocates them and whenever they were allocated."""

import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from recompile.measurement import Measurement, measure

MiB = 1 << 20


def block(num_mib: int) -> torch.Tensor:
    return torch.empty(num_mib * MiB, dtype=torch.uint8)


def live_mib(measurement: Measurement) -> list[float]:
    """The timeline's bytes in MiB, without its last point, which repeats the one before."""
    return [live_bytes / MiB for _, live_bytes in measurement.timeline[:-1]]


def test_nothing_allocated_is_zero():
    measurement = measure(lambda: None)
    assert measurement.peak_bytes == 0
    assert [live for _, live in measurement.timeline] == [0, 0]


def test_blocks_alive_one_after_the_other_count_once():
    def fn():
        for _ in range(3):
            block(2)

    assert live_mib(measure(fn)) == [0, 2, 0, 2, 0, 2, 0]


def test_blocks_alive_together_add_up_and_the_peak_is_their_sum():
    def fn():
        a = block(1)
        b = block(2)
        del a
        c = block(4)
        del b, c

    measurement = measure(fn)
    assert live_mib(measurement) == [0, 1, 3, 2, 6, 4, 0]
    assert measurement.peak_bytes == 6 * MiB


def test_the_peak_is_exact_to_the_byte():
    assert measure(torch.empty, 12345, dtype=torch.uint8).peak_bytes == 12345


def test_what_was_allocated_before_does_not_count():
    held = block(64)
    assert measure(lambda: held.sum(dtype=torch.uint8)).peak_bytes < MiB


def test_what_the_call_returns_is_alive_at_the_end_of_the_timeline():
    assert measure(block, 3).timeline[-1][1] == 3 * MiB


def test_memory_freed_that_was_there_before_makes_live_bytes_negative_and_the_peak_zero():
    held = [block(8)]
    measurement = measure(held.clear)
    assert live_mib(measurement) == [0, -8]
    assert measurement.peak_bytes == 0


def test_memory_freed_that_was_there_before_makes_room():
    held = [block(8)]

    def fn():
        held.clear()
        held.append(block(9))

    assert live_mib(measure(fn)) == [0, -8, 1]


def test_a_view_keeps_its_storage_alive():
    held = [block(8)]
    views = [held[0][:1]]

    def fn():
        held.clear()
        a = block(1)
        views.clear()
        del a

    assert live_mib(measure(fn)) == [0, 1, -7, -8]


def test_gradients_that_are_replaced_are_no_increase():
    layer = torch.nn.Linear(512, 512)  # 1 MiB of weights

    def step():
        layer.zero_grad()
        layer(torch.ones(1, 512)).sum().backward()

    first, second = measure(step), measure(step)
    assert MiB < first.peak_bytes < 1.1 * MiB
    assert second.peak_bytes < 0.1 * MiB


def test_a_block_of_an_earlier_measurement_that_was_freed_since_leaves_no_trace():
    for num_mib in (1, 2, 3):
        assert measure(block, num_mib).peak_bytes == num_mib * MiB
        held = [block(4) for _ in range(3)]  # May lie where the freed block was, with another size.
        assert live_mib(measure(held.clear)) == [0, -4, -8, -12]


def test_a_block_of_an_earlier_measurement_freed_in_a_later_one_counts_once():
    held = []
    measure(lambda: held.append(block(5)))
    assert live_mib(measure(held.clear)) == [0, -5]


def test_memory_of_numpy_does_not_count_and_shared_memory_does():
    held = [torch.from_numpy(numpy.zeros(MiB)), block(4).share_memory_()]
    assert measure(held.clear).timeline[-1][1] == -4 * MiB


@pytest.mark.filterwarnings("error")
def test_fake_and_meta_and_sparse_tensors_that_are_about_do_no_harm():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        held = [torch.empty(MiB, requires_grad=True)]
    held += [torch.empty(MiB, device="meta"), torch.eye(3).to_sparse(), torch.vmap(torch.sin)(torch.ones(2, 2))]
    assert measure(held.clear).peak_bytes == 0


def test_the_gradients_of_backward_count():
    x = torch.ones(MiB, requires_grad=True)  # 4 MiB

    def fn():
        (x * x).sum().backward()

    assert measure(fn).peak_bytes == 8 * MiB + 8  # Two terms, one added into the other; the loss and its gradient.


def test_a_helper_thread_counts():
    def fn():
        a = block(1)
        thread = threading.Thread(target=lambda: block(4))
        thread.start()
        thread.join()
        b = block(2)
        del a, b

    assert live_mib(measure(fn)) == [0, 1, 5, 1, 3, 2, 0]


def test_a_block_may_change_hands_between_threads():
    held = []

    def fn():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: held.append(block(4))).result()
        held.clear()
        held.append(block(2))
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()

    assert live_mib(measure(fn)) == [0, 4, 0, 2, 0]


def test_memory_that_was_there_before_may_be_freed_by_a_helper_thread():
    held = [block(4)]

    def fn():
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()

    assert live_mib(measure(fn)) == [0, -4]


def test_a_thread_that_outlives_the_call_is_warned_about():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, name="late")]
    try:
        with pytest.warns(RuntimeWarning, match="thread 'late' outlives the measured call"):
            measure(lambda: threads[0].start())
    finally:
        release.set()
        threads[0].join()


def test_threads_start_as_before_after_a_measurement():
    start = threading.Thread.start
    measure(lambda: None)
    assert threading.Thread.start is start


def test_the_call_happens_once_with_its_arguments():
    calls = []
    measure(lambda *args, **kwargs: calls.append((args, kwargs)), 1, 2, key=3)
    assert calls == [((1, 2), {"key": 3})]


def test_seconds_are_those_of_the_call_and_bound_the_timeline():
    def fn():
        block(1)
        threading.Event().wait(0.05)
        block(1)

    measurement = measure(fn)
    times = [seconds for seconds, _ in measurement.timeline]
    assert 0.05 <= measurement.seconds < 5
    assert times == sorted(times)
    assert times[0] == 0 and times[-1] == measurement.seconds
    assert times[3] - times[2] > 0.045


def test_an_exception_goes_through_and_the_next_measurement_works():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fail)
    assert measure(block, 1).peak_bytes == MiB


def test_a_thing_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="takes a function to call, then its arguments; got int: 3"):
        measure(3)


def test_an_active_profiler_is_refused():
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="one is active already"):
        measure(lambda: None)
    with pytest.raises(RuntimeError, match="one is active already"):
        measure(measure, lambda: None)


@pytest.mark.parametrize("device", ["tpu", "meta", 1.5])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match=r'device=.*accepted are "cpu", "cuda"'):
        measure(lambda: None, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_cuda_device_is_refused():
    with pytest.raises(ValueError, match="sees no CUDA device"):
        measure(lambda: None, device="cuda")


def test_the_cpu_can_be_asked_for():
    assert measure(block, 1, device="cpu").peak_bytes == MiB
    assert measure(functools.partial(torch.empty, 4, device="cpu"), device=torch.device("cpu")).peak_bytes == 16


def test_nothing_is_written_to_stderr_but_what_the_call_writes():
    program = (
        "import sys; from recompile.measurement import measure; "
        "measure(lambda: print('mine', file=sys.stderr, flush=True)); measure(int)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr == "mine\n"


@pytest.mark.slow
def test_what_inductors_code_allocates_counts():
    x = torch.ones(MiB, requires_grad=True)  # 4 MiB

    @torch.compile
    def fn(x):
        return torch.cumsum(torch.cumsum(x, 0).exp(), 0)  # Two buffers at a time: a scan does not fuse into a scan.

    fn(x)
    assert measure(lambda: fn(x)).peak_bytes >= 8 * MiB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_the_allocators_peak():
    def fn(x):
        for _ in range(2):
            torch.empty_like(x)

    x = torch.empty(4 * MiB, dtype=torch.uint8, device="cuda")
    measurement = measure(fn, x)
    assert measurement.peak_bytes == 4 * MiB
    assert measurement.timeline == ((0.0, 0), (measurement.seconds, 0))
