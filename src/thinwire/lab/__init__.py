"""A slow network on one machine: N emulated hosts, with rates and latency of your choice.

Example:
    >>> with Lab(nodes=4, rate="100mbit") as lab:  # doctest: +SKIP
    ...     result = lab.start([sys.executable, "train.py"]).wait()
    ...     print(result.message, result.sent_nbytes)
"""

from thinwire.lab.clean import clean
from thinwire.lab.network import Lab, Loopback, Network, open_network
from thinwire.lab.run import LabResult, Run
from thinwire.lab.units import format_rate, parse_duration, parse_rate

__all__ = [
    "Lab",
    "LabResult",
    "Loopback",
    "Network",
    "Run",
    "clean",
    "format_rate",
    "open_network",
    "parse_duration",
    "parse_rate",
]
