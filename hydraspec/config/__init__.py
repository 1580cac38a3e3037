"""The typed configuration and its checks."""

from hydraspec.config.build import from_dict, to_dict, to_run_config
from hydraspec.config.schema import RunConfig

__all__ = ["RunConfig", "from_dict", "to_dict", "to_run_config"]
