from horizonrl.common.config.changes import config_changes

BEFORE = {
    "run": {"name": "a", "seed": 1},
    "envs": [1, 2],
    "loss": {"kind": "gspo", "low": 0.1},
    "old": None,
}
AFTER = {"run": {"name": "a", "seed": 2}, "envs": [1, 3], "loss": "gspo", "new": {"key": 1}}


def test_each_difference_is_named_by_its_key_with_both_values() -> None:
    assert config_changes(BEFORE, AFTER, "absent") == {
        "envs": ([1, 2], [1, 3]),
        "loss": ({"kind": "gspo", "low": 0.1}, "gspo"),
        "new": ("absent", {"key": 1}),
        "old": (None, "absent"),
        "run.seed": (1, 2),
    }


def test_what_is_absent_equals_none_unless_told_otherwise() -> None:
    assert config_changes({"deep": {"key": None}}, {"deep": {}}) == {}


def test_a_config_does_not_differ_from_itself() -> None:
    assert config_changes(BEFORE, BEFORE) == {}
