"""The rules of each game, which the agent reads before the first observation. AgentGym's servers leave them to clients.

They are short and in our own words. The option `instructions` replaces them, for example by AgentGym's own prompt.
"""

_REACT = 'Reply with a line "Thought:" and what you think, then a line "Action:" and one action.'
_TOOL = """\
You answer a question with tools. Each turn, call one:
Action: NAME with Action Input: {"argument": value}
`check_valid_actions` with {} lists the tools; `finish` with {"answer": ...} ends the task."""

RULES = {
    "textcraft": f"""\
You craft items in Minecraft by the recipes that are listed. Commands: get N item (what no recipe makes),
craft N item using M ingredient, M ingredient (exactly as in a recipe), inventory. Where a recipe says planks or wool,
name the kind.
{_REACT}""",
    "babyai": f"""\
You are in a grid of rooms and have a goal. Actions: turn left, turn right, move forward, go to OBJECT ID,
pick up OBJECT ID, go through DOOR ID (an open one), toggle and go through DOOR ID (a closed or locked one; a locked one
needs a key of its colour), toggle.
{_REACT}""",
    "sciworld": f"""\
You solve a task of elementary science in a house with a workshop and a greenhouse. Actions: look around, look at OBJ,
look in OBJ, go to LOC, open OBJ, close OBJ, activate OBJ, deactivate OBJ, connect OBJ to OBJ, disconnect OBJ,
use OBJ on OBJ, read OBJ, pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ into OBJ, dunk OBJ into OBJ, mix OBJ,
eat OBJ, flush OBJ, focus on OBJ, wait, wait1, task, inventory. `focus on` says which object the task is about: a wrong
one ends it.
{_REACT}""",
    "alfworld": f"""\
You do a task in a household. Each turn, take one of the available actions. "Nothing happened" means that the action
was not possible.
{_REACT}""",
    "maze": f"""\
Find the way to the goal in few steps. Moving right adds 1 to your second coordinate, moving down adds 1 to the first.
Actions: move up, move down, move left, move right.
{_REACT}""",
    "wordle": f"""\
Guess a hidden word of five letters in six attempts. Write a guess as five letters with spaces, such as s h i r e. The
answer has a letter for each: g, right; y, in the word but elsewhere; b, not in the word.
{_REACT}""",
    "webshop": f"""\
You shop on the web as the instruction says. Actions: search[keywords], where there is a search bar, and click[value],
of one of the values that can be clicked.
{_REACT}""",
    "webarena": """\
You browse the web to reach an objective. You see the page's accessibility tree, its URL and the open tabs. Actions:
click [id], type [id] [text] [0 or 1: press enter], hover [id], press [keys], scroll [up or down], new_tab,
tab_focus [number], close_tab, goto [url], go_back, go_forward, stop [answer]. Think first, then write one action
between triple backticks, such as ```click [1234]```. `stop` ends the task; its answer is N/A where there is none.""",
    "sqlgym": """\
You answer a question with one SQL query of an SQLite database. Think first, then write the query in one line between
```sql and ```.""",
    "searchqa": """\
You answer a question by searching. Reason within <think> and </think>. Ask with <search>query</search> and wait for the
<information> that answers it. End with <answer>answer</answer>, in few words.""",
    "weather": _TOOL,
    "movie": _TOOL,
    "academia": _TOOL,
    "sheet": _TOOL,
    "todo": _TOOL,
}
