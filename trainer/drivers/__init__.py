"""How collecting and training take turns: `run.driver` names one of `DRIVERS`."""

from titogym.trainer.drivers.asynchronous import AsynchronousDriver
from titogym.trainer.drivers.base import Driver
from titogym.trainer.drivers.synchronous import SynchronousDriver

DRIVERS: dict[str, type[Driver]] = {"async": AsynchronousDriver, "sync": SynchronousDriver}
