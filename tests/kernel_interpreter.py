"""Run as a program: the kernel package's own kernels against the reference, through Triton's interpreter.

There is no CUDA device here, so the kernels' code runs on the CPU, one program after the other. Three things
stand in for a device: tensors say they are on one, each kernel has one configuration instead of being tuned,
and the loop over sources gives tensors (the interpreter gives plain numbers, which lack a method that the
kernels call). The comparison takes 8 tokens, to be done in time. What is shown is the package's arithmetic,
and how this project calls it; neither speed nor what a compiler makes of it. Prints a JSON object: case ->
worst relative error, or the refusal.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch  # noqa: E402

torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]
with warnings.catch_warnings():  # that there is no device, and what comes of it
    warnings.simplefilter("ignore")
    from fla.ops.attnres import fused  # noqa: E402
from kernel_support import spec  # noqa: E402
from model_support import loss_and_gradients, make_model, relative_error  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from attnres.depth import kernel  # noqa: E402
from attnres.errors import UserError  # noqa: E402
from attnres.residual.attnres import depth_attention  # noqa: E402

KERNELS = ("attnres_fwd_kernel", "attnres_bwd_kernel_dv", "attnres_bwd_kernel_dqdw")


def tensor_range(*bounds: Any) -> Iterator[Any]:
    for index in range(*(int(bound) for bound in bounds)):
        yield interpreter._implicit_cvt(index)


def set_up() -> None:
    fused.range = tensor_range
    for name in KERNELS:
        tuned = getattr(fused, name)
        tuned.configs = tuned.configs[:1]
    kernel.CHECKED_ELEMENTS, kernel.TOKENS_STEP = 0, 8


def model_error(rule: str, autocast: bool) -> float:
    """Worst relative error of the loss and of all gradients of a float32 model of 10 sublayers.

    Under autocast in units of the reference's own error there: what both differ from is the float32 model.
    """

    def values(how: str, autocast: bool) -> dict[str, torch.Tensor]:
        model = make_model(spec(rule, how), random_rule=True, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_and_gradients(model)

    exact = values("reference", False)
    error = relative_error(values("kernel", autocast), exact)
    return error / relative_error(values("reference", True), exact) if autocast else error


def refusal(wrong: Any) -> str:
    """What is said of an operator that is not what the reference is."""
    kernel.checked_operator.cache_clear()
    kernel.load_operator, right = (lambda: wrong), kernel.load_operator
    try:
        kernel.checked_operator(torch.device("cpu"), 12, 11, 8, 1e-8, depth_attention)
    except UserError as error:
        return str(error)
    finally:
        kernel.load_operator = right
        kernel.checked_operator.cache_clear()
    return "accepted"


def released() -> bool:
    """Whether a read's sources are gone after the backward pass while its result lives."""
    source = 2 * torch.ones(1, 2, 12, requires_grad=True)
    alive = StorageWeakRef(source.untyped_storage())
    output = kernel.load_operator()([source, 3 * source], torch.ones(12), torch.ones(12), 1e-8)
    loss = output.sum()
    del source, output
    before = alive.expired()
    loss.backward()
    gc.collect()  # the interpreter leaves cycles
    return not before and alive.expired()


def wrong_scale(sources: Any, query: Any, gain: Any, eps: float) -> torch.Tensor:
    return fused.fused_attnres(query, sources, gain, rms_eps=eps, scale=1.01)


def no_gain(sources: Any, query: Any, gain: Any, eps: float) -> torch.Tensor:
    return fused.fused_attnres(query, sources, torch.ones_like(gain) + 0 * gain, rms_eps=eps)


def main(cases: list[str]) -> dict[str, Any]:
    set_up()
    known = {
        "parity": lambda: kernel.largest_difference(
            kernel.load_operator(), depth_attention, torch.device("cpu"), 20, 11, 8, 1e-8
        )[1],
        "released": released,
        "wrong_scale": lambda: refusal(wrong_scale),
        "no_gain": lambda: refusal(no_gain),
    }
    results: dict[str, Any] = {}
    for case in cases:
        rule, _, autocast = case.partition("/")
        results[case] = known[case]() if case in known else model_error(rule, autocast == "bfloat16")
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
