"""Which way a kernel comes to be, forced by a row and checked by its receipt."""

from bench.samples import NotMeasured
from sbx import AsyncSandbox, Policy, Runtime
from sbx.isolation.receipt import Receipt
from sbx.policy import load
from sbx.policy.tables import PoolPolicy

DATA_SCIENCE: Policy = load("data-science")
WITHOUT_POOL = DATA_SCIENCE.model_copy(update={"pool": PoolPolicy(min_idle=0, max_idle=0)})


def came_by(receipt: Receipt | None, *paths: str) -> None:
    """Raises NotMeasured when the kernel came another way than the row is about."""
    if receipt is None:
        raise NotMeasured("a kernel is gone before it was measured")
    if receipt.path not in paths:
        why = f" ({receipt.fallback})" if receipt.fallback else ""
        raise NotMeasured(
            f"a kernel came by {receipt.path}, where {' or '.join(paths)} is measured{why}"
        )


async def zygote_started(runtime: Runtime, policy: Policy) -> None:
    """Returns when kernels of this policy are forked. Raises NotMeasured when they are not."""
    async with await runtime.create(policy) as box:
        came_by(await box.start(), "pool", "fork")


async def answers(box: AsyncSandbox) -> None:
    """The kernel runs 1+1. Raises NotMeasured when it does not: what failed is no sample."""
    run = await box.run("1+1")
    if run.result != "2":
        raise NotMeasured(f"1+1 gave {run.result!r}, with the status {run.status}")
