"""Recorded conversations: what is read from a file, what is refused, and the way there and back."""

import asyncio
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.types import Episode, Kind, Sampling, Task, Ticket
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import task_named
from horizonrl.envs.check import check
from horizonrl.envs.transcripts import Transcript, load_transcripts, to_record
from horizonrl.ops.cli.main import main
from tests.actors.players import SayingPolicy, make_chat
from tests.actors.rollout.test_replies import JsonCalls
from tests.templates import tool_tokenizer

SPOKEN = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
SAID = SPOKEN.filter(bool)
EPISODES = st.lists(
    st.tuples(SAID, st.lists(st.tuples(SAID, SPOKEN), min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)
ODD_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | SPOKEN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["item_id", "conversations", "messages", "from", "role", "value", "loss"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


def human(text: str) -> dict[str, Any]:
    return {"from": "human", "loss": None, "value": text}


def gpt(text: str, loss: bool | None = True) -> dict[str, Any]:
    return {"from": "gpt", "loss": loss, "value": text}


AGENTTRAJ = {
    "item_id": "textcraft_12",
    "conversations": [
        human("These are the rules."),
        gpt("OK. I will follow them.", loss=False),
        human("Goal: craft stick."),
        gpt("get 2 planks"),
        human("Got 2 planks"),
        gpt("craft 4 stick"),
    ],
}
REPLAYED = Transcript(
    prompt="These are the rules.\n\nGoal: craft stick.",
    turns=("get 2 planks", "craft 4 stick"),
    observations=("Got 2 planks", ""),
)


def write_value(tmp_path: Path, *records: Any, name: str = "demos.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> dict[str, Transcript]:
    return dict(load_transcripts(path).transcripts)


def test_what_stands_before_the_first_turn_with_loss_is_the_prompt_without_the_agents_words(
    tmp_path: Path,
) -> None:
    assert read(write_value(tmp_path, AGENTTRAJ)) == {"textcraft_12": REPLAYED}


def test_a_json_list_reads_as_lines_do(tmp_path: Path) -> None:
    lines, whole = write_value(tmp_path, AGENTTRAJ, AGENTTRAJ), tmp_path / "demos.json"
    whole.write_text("\n " + json.dumps([AGENTTRAJ, AGENTTRAJ], indent=2))
    assert read(whole) == read(lines)


def test_messages_are_conversations_too(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "These are the rules."},
        {"role": "user", "content": "Goal: craft stick."},
        {"role": "assistant", "content": "get 2 planks"},
        {"role": "user", "content": "Got 2 planks"},
        {"role": "assistant", "content": "craft 4 stick"},
    ]
    assert read(write_value(tmp_path, {"messages": messages, "source": "elsewhere"})) == {
        "record_0": REPLAYED
    }


def test_a_reply_as_openais_client_dumps_it_is_read_with_the_nulls_of_its_absent_fields(
    tmp_path: Path,
) -> None:
    nulls = dict.fromkeys(
        ("refusal", "annotations", "audio", "function_call", "tool_calls", "name")
    )
    plain = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Right."}]
    dumped = [plain[0], plain[1] | nulls]
    files = [
        write_value(tmp_path, {"messages": said}, name=name)
        for said, name in ((plain, "a.jsonl"), (dumped, "b.jsonl"))
    ]
    assert read(files[0]) == read(files[1])
    for empty in ({"content": None}, {"content": "x", "refusal": "I cannot."}):
        with pytest.raises(ConfigError):
            read(write_value(tmp_path, {"messages": [plain[0], {"role": "assistant"} | empty]}))


def test_an_answer_to_the_last_turn_is_kept(tmp_path: Path) -> None:
    record = {
        "item_id": 7,
        "conversations": [human("go"), gpt("a"), human("b"), gpt("c"), human("won")],
    }
    assert read(write_value(tmp_path, record))["7"].observations == ("b", "won")


RULES, ACK = (
    "These are the rules.",
    "OK. I'll follow your instructions and try my best to solve the task.",
)


def logged(reward: float, item_id: str | int = "textcraft_12", **extra: Any) -> dict[str, Any]:
    """A record as AgentGym-RL's rollouts write it: roles and contents; the first answer is not marked as no turn."""
    turns = [("user", RULES), ("assistant", ACK), ("user", "Goal: craft stick."), ("assistant", "get 2 planks"),
            ("user", "Got 2 planks"), ("assistant", "craft 4 stick"), ("user", "Crafted 4 stick")]  # fmt: skip
    messages = [{"role": role, "content": text, **extra} for role, text in turns]
    return {"item_id": item_id, "conversations": messages, "reward": reward}


def test_a_rollout_log_of_agentgym_rl_is_read_as_the_model_played_it(tmp_path: Path) -> None:
    file = tmp_path / "step7" / "0.json"
    file.parent.mkdir()
    file.write_text(json.dumps([logged(1, item_id=12), logged(0, item_id=13)], indent=4))
    answered = Transcript(
        prompt=REPLAYED.prompt,
        turns=REPLAYED.turns,
        observations=("Got 2 planks", "Crafted 4 stick"),
    )
    assert read(tmp_path) == read(file) == {"12": answered}


def test_an_evaluation_of_agentgym_is_a_folder_of_records_with_what_a_model_thought(
    tmp_path: Path,
) -> None:
    for name, reward in (("textcraft_3", 1), ("textcraft_12", 1), ("textcraft_9", 0)):
        record = logged(reward, name, reasoning_content=None) | {"success": reward}
        record["conversations"][3]["reasoning_content"] = "Let me see."
        (tmp_path / f"{name}.json").write_text(json.dumps(record, indent=4))
    listed = read(tmp_path)
    assert list(listed) == ["textcraft_12", "textcraft_3"]
    assert listed["textcraft_3"].turns == REPLAYED.turns


@pytest.mark.parametrize(
    ("item_id", "reward", "solved"),
    [
        ("sciworld_3", 100, True),
        ("sciworld_3", 75, False),
        ("sciworld_3", 1, False),
        ("babyai_3", 0.93, True),
        ("babyai_3", 0, False),
        ("webshop_3", 0.75, False),
        ("lmrlgym_wordle_3", 1, True),
        ("maze_3", -1, False),
        (3, 1, True),
        (3, 0, False),
    ],
)
def test_only_what_was_solved_is_imitated(
    tmp_path: Path, item_id: str | int, reward: float, solved: bool
) -> None:
    path = write_value(tmp_path, AGENTTRAJ, logged(reward, item_id))
    assert list(read(path)) == ["textcraft_12", *([str(item_id)] if solved else [])]


def test_a_reward_that_does_not_say_whether_it_was_solved_is_refused_unless_the_user_says(
    tmp_path: Path,
) -> None:
    path = write_value(tmp_path, logged(75, item_id=3), logged(100, item_id=4))
    with pytest.raises(
        ConfigError, match=r"line 1: the reward is 75 .* set options\.solved_at to the least reward"
    ):
        load_transcripts(path)
    assert list(load_transcripts(path, 100.0).transcripts) == ["4"]
    options = {"path": str(path), "solved_at": 75}
    assert [task.task_id for task in registry.tasks("transcripts", options)] == ["3", "4"]
    with pytest.raises(ConfigError, match=r"none of the 2 records .* was solved"):
        load_transcripts(path, 101.0)
    with pytest.raises(ConfigError, match=r"line 1: reward: Input should be a valid number"):
        load_transcripts(write_value(tmp_path, {**AGENTTRAJ, "reward": "high"}, name="odd.jsonl"))


def test_a_turn_that_says_ok_is_one_where_it_is_marked_or_comes_later(tmp_path: Path) -> None:
    record = {
        "item_id": "x_1",
        "conversations": [human("go"), gpt("Ok."), human("b"), gpt("Ok.", None)],
    }
    assert read(write_value(tmp_path, record))["x_1"].turns == ("Ok.", "Ok.")


def test_names_that_come_again_are_numbered_and_the_mark_of_an_export_from_windows_is_no_text(
    tmp_path: Path,
) -> None:
    path = tmp_path / "demos.jsonl"
    named = [AGENTTRAJ | {"item_id": name} for name in ("a_1", "a_1", "a_1#2", "a_1")]
    path.write_text("\ufeff" + "\r\n".join(json.dumps(record) for record in named) + "\r\n\r\n")
    assert list(read(path)) == ["a_1", "a_1#3", "a_1#2", "a_1#4"]


def test_tasks_are_the_records_in_order_and_categories_their_sources(tmp_path: Path) -> None:
    records = [
        AGENTTRAJ | {"item_id": name}
        for name in ("textcraft_3", "babyai_1", "oak_planks", "babyai_1")
    ]
    listed = registry.tasks("transcripts", {"path": str(write_value(tmp_path, *records))})
    assert [task.task_id for task in listed] == [
        "textcraft_3",
        "babyai_1",
        "oak_planks",
        "babyai_1#2",
    ]
    assert [task.category for task in listed] == ["textcraft", "babyai", "all", "babyai"]
    assert {task.split for task in listed} == {"train"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(episodes=EPISODES, as_list=st.booleans())
def test_any_episode_that_is_written_is_read_back(
    tmp_path: Path, episodes: Any, as_list: bool
) -> None:
    records = [
        to_record(f"x_{number}", prompt, turns) for number, (prompt, turns) in enumerate(episodes)
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    text = f"[{','.join(lines)}]" if as_list else "\n".join(lines)
    path = tmp_path / f"{sha256(text.encode()).hexdigest()}.json"
    path.write_text(text, encoding="utf-8", newline="\n")
    found = read(path)
    for (prompt, turns), transcript in zip(episodes, found.values(), strict=True):
        replies, answers = zip(*turns, strict=True)
        assert transcript == Transcript(
            prompt=prompt, turns=replies, observations=(*answers[:-1], "")
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=ODD_JSON
    | st.builds(lambda items: {"conversations": items}, st.lists(ODD_JSON, max_size=3))
)
def test_any_other_json_is_a_config_error_that_names_the_place(tmp_path: Path, value: Any) -> None:
    text = json.dumps(value)
    path = tmp_path / f"{sha256(text.encode()).hexdigest()}.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=path.name):
        load_transcripts(path)


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (
            [human("go"), gpt("a"), human("b"), gpt("c", False)],
            r"turn 3 is the agent's with loss false after one with",
        ),
        ([human("go"), gpt("a"), gpt("b")], r"turn 2 is from gpt where human must follow"),
        (
            [human("go"), gpt("a"), human("b"), human("c")],
            r"turn 3 is from human where gpt must follow",
        ),
        ([human("go"), gpt("a", False)], r"no turn of the agent .* leave the record out"),
        ([gpt("a"), human("b"), gpt("c")], r"turn 0 is the agent's and nothing stands before it"),
        ([human("go"), gpt("")], r"turn 1 is the agent's and empty"),
        (
            [human("go"), {"from": "critic", "value": "x"}],
            r"conversations\.1\.from: Input should be 'human', 'gpt'",
        ),
        (
            [human("go"), gpt("a") | {"weight": 0}],
            r"conversations\.1\.weight: Extra inputs are not permitted",
        ),
        ([human("go"), {"from": "gpt"}], r"conversations\.1\.value: Field required"),
        (
            [human("go"), gpt("x" * 300_000)],
            r"conversations\.1\.value: String should have at most 262144",
        ),
        ([], r"no turn of the agent"),
    ],
)
def test_a_conversation_that_is_no_episode_is_refused_with_file_line_and_turn(
    tmp_path: Path, conversation: list[Any], message: str
) -> None:
    path = write_value(tmp_path, AGENTTRAJ, {"item_id": "bad_1", "conversations": conversation})
    with pytest.raises(ConfigError, match=rf"demos\.jsonl, line 2: .*{message}"):
        load_transcripts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"holds no record"),
        (b"[]", r"holds no record"),
        (
            b"\n\nitem_id,conversations\n",
            r"line 3 is not JSON .*: write a JSON list, or one record a line",
        ),
        (b'{"item_id": "a",\n "conversations": []}', r"line 1 is not JSON"),
        (b'{\n"item_id": "a",\n "conversations": []}', r"demos\.jsonl: no turn of the agent"),
        (b'{\n"item_id": ', r"demos\.jsonl is not JSON"),
        (b"[{},", r"demos\.jsonl is not JSON .*line 1"),
        (b"[" * 100_000, r"is not JSON"),
        (b'[{"conversations": 1}]', r"record 0: conversations: Input should be a valid tuple"),
        (b"3", r"line 1: the record: Input should be a valid dictionary"),
        (b"\xff\xfe{", r"is not UTF-8"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_transcripts(path)


def test_without_a_file_the_message_says_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'options = \{ path = "demos\.jsonl" \}'):
        registry.select("transcripts")
    with pytest.raises(
        ConfigError, match=r"no transcripts at .*gone\.jsonl: a relative path starts at /"
    ):
        registry.make("transcripts", {"path": str(tmp_path / "gone.jsonl")})
    with pytest.raises(ConfigError, match=r"option path: .* \(got 3\)"):
        registry.select("transcripts", options={"path": 3})


def test_the_version_names_the_file_by_its_digest(tmp_path: Path) -> None:
    path = write_value(tmp_path, AGENTTRAJ)
    version = registry.make("transcripts", {"path": str(path)}).version
    assert version == f"1 sha256:{sha256(path.read_bytes()).hexdigest()[:16]}"


async def test_an_episode_is_replayed_whatever_it_is_told_and_ends_once(tmp_path: Path) -> None:
    environment = registry.make("transcripts", {"path": str(write_value(tmp_path, AGENTTRAJ))})
    assert (await environment.reset("textcraft_12")).text == REPLAYED.prompt
    expert = environment.expert()
    assert expert.act("") == "get 2 planks"
    first = await environment.step("something else")
    assert (first.observation, first.terminated) == ("Got 2 planks", False)
    assert expert.act("") == "craft 4 stick"
    last = await environment.step("")
    assert (last.reward, last.terminated, last.success) == (1.0, True, True)
    with pytest.raises(EnvironmentFailure, match="over after 2 turns"):
        await environment.step("")


def test_transcripts_keep_the_contract_of_an_environment(tmp_path: Path) -> None:
    report = asyncio.run(
        check("transcripts", {"path": str(write_value(tmp_path, AGENTTRAJ, AGENTTRAJ))})
    )
    assert [found for found in report.checks if not found.passed] == []
    assert report.version.startswith("1 sha256:")


CHAT = make_chat()


def demonstration(env_id: str, options: dict[str, Any], task_id: str) -> Episode:
    ticket = Ticket(
        number=0,
        kind=Kind.DEMO,
        task=Task(env_id=env_id, task_id=task_id),
        group_size=1,
        horizon_turns=64,
        announce_horizon=True,
        sampling=Sampling(max_turn_tokens=256),
    )
    rollout = Rollout(
        SayingPolicy(CHAT, max_context_tokens=1 << 16), CHAT, None, step_timeout_s=10.0
    )
    return asyncio.run(rollout.episode(registry.make(env_id, options), ticket, 0))


@pytest.mark.parametrize("action_format", ["plain", "react"])
def test_what_the_expert_exports_is_read_back_token_for_token(
    tmp_path: Path, action_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "demos.jsonl", tmp_path / "recipe.toml"
    recipe.write_text(f'[[envs]]\nid = "textcraft"\noptions = {{ format = "{action_format}" }}\n')
    assert main(["demos", str(recipe), "--out", str(out), "--count", "12"]) == 0
    assert "wrote 12 demonstrations of textcraft" in capsys.readouterr().out
    options = {"path": str(out)}
    listed, named = (
        registry.tasks("transcripts", options),
        task_named("textcraft", registry.tasks("textcraft")),
    )
    assert len(listed) == 12
    for task in listed:
        assert task.category == "textcraft"
        original = named(int(task.task_id.rpartition("_")[2]))
        assert original is not None
        again = demonstration("transcripts", options, task.task_id)
        own = demonstration("textcraft", {"format": action_format}, original)
        assert (again.stop, again.success) == (own.stop, own.success) == ("terminated", True)
        assert again.prompt_ids == own.prompt_ids
        assert [(turn.output_ids, turn.observation_ids) for turn in again.turns] == [
            (turn.output_ids, turn.observation_ids) for turn in own.turns
        ]


@pytest.mark.parametrize(
    ("first", "line"), [("{\n", "\n"), ("{\r\n", "\r\n"), ("{ \n", "\n"), (" \n{\t\n", "\n")]
)
def test_one_record_over_many_lines_is_read_however_its_lines_end(
    tmp_path: Path, first: str, line: str
) -> None:
    lines = json.dumps(AGENTTRAJ, indent=2).split("\n")
    path = tmp_path / "demo.json"
    path.write_bytes((first + line.join(lines[1:])).encode())
    assert read(path) == {"textcraft_12": REPLAYED}


def test_a_folder_has_its_record_files_alone_without_the_copies_that_programs_hide(
    tmp_path: Path,
) -> None:
    (tmp_path / "deep.json" / "er").mkdir(parents=True)
    write_value(tmp_path / "deep.json" / "er", AGENTTRAJ, name="DEMOS.JSONL")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write_value(tmp_path / ".ipynb_checkpoints", AGENTTRAJ, name="demos-checkpoint.jsonl")
    (tmp_path / "._demos.jsonl").write_bytes(b"\0\5\x16\7\0\xff")
    assert read(tmp_path) == {"textcraft_12": REPLAYED}


PAGE = Path(__file__).parents[2] / "docs/environments/transcripts.md"


def calling(name: str, call_id: str | None, arguments: Any = "{}") -> dict[str, Any]:
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return called | ({} if call_id is None else {"id": call_id})


def agent(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(content: str, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content} | (
        {} if call_id is None else {"tool_call_id": call_id}
    )


def tooled(*messages: dict[str, Any], tools: tuple[str, ...] = ("look", "take")) -> dict[str, Any]:
    listed = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in tools
    ]
    return {"messages": [{"role": "user", "content": "go"}, *messages], "tools": listed}


def replayed(path: Path) -> list[tuple[Any, list[tuple[str, float, bool]]]]:
    """Play the first record as a rollout does: each reply's calls, or its text."""

    async def scenario() -> list[tuple[Any, list[tuple[str, float, bool]]]]:
        environment = registry.make("transcripts", {"path": str(path)})
        await environment.reset(next(iter(read(path))))
        shown = []
        while not (shown and shown[-1][1][-1][2]):
            reply = environment.expert().reply("")
            steps = [await environment.call(call) for call in reply.calls] or [
                await environment.step(reply.text)
            ]
            calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
            shown.append(
                ((reply.text, calls), [(s.observation, s.reward, s.terminated) for s in steps])
            )
        return shown

    return asyncio.run(scenario())


def test_recorded_calls_are_replayed_with_their_results_by_id(tmp_path: Path) -> None:
    path = write_value(
        tmp_path,
        tooled(
            agent(
                calling("look", "a"), calling("take", "b", {"what": "key"}), content="First I look."
            ),
            result("taken", "b"),
            result("a key", "a"),
            agent(calling("look", None)),
            result("nothing"),
            {"role": "assistant", "content": "Done.", "tool_calls": None},
        ),
    )
    assert replayed(path) == [
        (
            ("First I look.", [("look", {}), ("take", {"what": "key"})]),
            [("a key", 0.0, False), ("taken", 0.0, False)],
        ),
        (("", [("look", {})]), [("nothing", 0.0, False)]),
        (("Done.", []), [("", 1.0, True)]),
    ]


def test_a_record_may_end_with_calls(tmp_path: Path) -> None:
    path = write_value(tmp_path, tooled(agent(calling("look", "a"), calling("take", "b"))))
    assert replayed(path) == [
        (("", [("look", {}), ("take", {})]), [("", 0.0, False), ("", 1.0, True)])
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            tooled(agent(calling("look", "a")), {"role": "user", "content": "b"}),
            r"turn 1 makes 1 calls and 0 results",
        ),
        (
            tooled(agent(calling("look", "a")), result("x"), result("y")),
            r"turn 1 makes 1 calls and 2 results",
        ),
        (tooled(agent(calling("look", "a")), tools=()), r"calls tools and the record lists none"),
        (
            tooled(agent(calling("look", "a", "[1]"))),
            r"the arguments of look must be a JSON object, not '\[1\]'",
        ),
        (tooled(agent(calling("look", "a", "{"))), r"the arguments of look must be a JSON object"),
        (
            tooled(agent(*[calling("look", None)] * 9)),
            r"tool_calls: Tuple should have at most 8 items",
        ),
        (
            tooled({"role": "assistant", "content": "a"}, result("x")),
            r"turn 2 is from tool where human must follow",
        ),
        (
            tooled({"role": "assistant", "content": None}),
            r"content: Input should be a valid string",
        ),
        (
            tooled({"role": "user", "content": "a", "tool_calls": [calling("look", "a")]}),
            r"only the agent calls tools",
        ),
        (
            tooled(agent(calling("look", "a")) | {"loss": False}, result("x"), gpt("b")),
            r"stands before the first turn",
        ),
    ],
)
def test_calls_that_are_no_episode_are_refused(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"demos\.jsonl, line 1: .*{message}"):
        load_transcripts(write_value(tmp_path, record))


def test_the_pages_example_is_imitated_in_the_models_own_syntax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, language in (("demos.json", "json"), ("recipe.toml", "toml")):
        block = re.search(
            rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
        )
        assert block is not None
        Path(name).write_text(block[1])
    assert main(["envs", "check", "transcripts", "--options.path", "demos.json"]) == 0
    assert "1 tools" in capsys.readouterr().out
    (env,) = RunConfig.load([Path("recipe.toml")], []).envs
    (task,) = registry.tasks(env.id, env.options)
    chat = ChatTemplate(tool_tokenizer())
    policy = SayingPolicy(chat, max_context_tokens=1 << 16)
    rollout = Rollout(policy, chat, None, step_timeout_s=10.0, parser=JsonCalls())
    ticket = Ticket(
        number=0,
        kind=Kind.DEMO,
        task=Task(env_id=env.id, task_id=task.task_id),
        group_size=1,
        horizon_turns=8,
        announce_horizon=False,
        sampling=Sampling(max_turn_tokens=256),
    )
    episode = asyncio.run(rollout.episode(registry.make(env.id, env.options), ticket, 0))
    assert (episode.stop, episode.success, len(episode.turns)) == ("terminated", True, 2)
    assert '"name": "weather"' in chat.decode(episode.prompt_ids)
    call, answer = (chat.decode(turn.output_ids) for turn in episode.turns)
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Gavle", "date": "2024-05-01"}}'
        in call
    )
    assert "<tool_response>\ntemperature: 27, wind: 56" in chat.decode(
        episode.turns[0].observation_ids
    )
    assert answer.startswith("It is 27 degrees.")
