"""A smolagents program: it answers questions by writing Python. Nothing in `solve` knows of HorizonRL."""

import os
from typing import Any

from smolagents import EMPTY_PROMPT_TEMPLATES, CodeAgent, OpenAIModel

SYSTEM = """Answer with Python that calls final_answer. For example:
Task: What is 2 plus 3?
<code>
final_answer(2 + 3)
</code>"""


def solve(task: dict[str, Any]) -> Any:
    """Play one task; what is returned goes to `grade`."""
    model = OpenAIModel(
        "policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    templates = EMPTY_PROMPT_TEMPLATES | {"system_prompt": SYSTEM}
    agent = CodeAgent(
        tools=[], model=model, prompt_templates=templates, max_steps=2, verbosity_level=0
    )
    return agent.run(task["question"])
