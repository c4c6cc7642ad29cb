"""The environment of a process that gets the resolved config as its recipe, which no variable may win over."""

import os
import re

from horizonrl.common.config.loading import PASSWORD
from horizonrl.common.config.schema import RunConfig

# As pydantic-settings reads them: in any case, and a whole section too.
_KEY_OF_CONFIG = re.compile(
    rf"HORIZONRL_({'|'.join(RunConfig.model_fields)})(__\w+)?", re.IGNORECASE
)


def recipe_environment(config: RunConfig) -> dict[str, str]:
    """Return this process's variables without those that set keys of the config, and with the broker's password."""
    kept = {name: value for name, value in os.environ.items() if not _KEY_OF_CONFIG.fullmatch(name)}
    secret = config.broker.nats.password
    if secret is not None:  # neither in the recipe nor as an argument: others can read those
        kept[PASSWORD] = secret.get_secret_value()
    return kept
