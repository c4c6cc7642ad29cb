"""Write SmolLM2 with template.jinja as its chat template: `python model.py DIRECTORY`."""

import shutil
import sys
from pathlib import Path

from horizonrl.ops.models.models import SMOLLM2, resolve_model


def main() -> None:
    target = Path(sys.argv[1])
    shutil.copytree(resolve_model(SMOLLM2), target)
    shutil.copy(Path(__file__).with_name("template.jinja"), target / "chat_template.jinja")
    print(f"{target} is SmolLM2, with a template that knows tools")


if __name__ == "__main__":
    main()
