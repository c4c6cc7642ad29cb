"""The five domains: their tools, their made-up stores, and their problems."""

from random import Random

from horizonrl.envs.game import words
from horizonrl.envs.worlds.tools.toolbox import (
    Call,
    Domain,
    Problem,
    Store,
    Tool,
    ToolError,
    call,
    find_row,
    format_fields,
    join_names,
    show,
)

_NAMES = words("Ada Ben Cleo Dov Eda Finn Gia Hal Ivo June Kai Lea Mona Nils Olga Piet")
_SURNAMES = words("Abel Brook Crane Dahl Evers Frost Gold Hale Iver Jansen Kern Lund")
_CITIES = words("Albar Brenna Corvo Dunst Elmora Farrow Gavle Hestia Ivrea Joss")
_DATES = tuple(f"2024-05-{day:02d}" for day in range(1, 8))
_TITLES = tuple(
    f"{first} {second}"
    for first in words("Silent Crimson Hollow Last")
    for second in words("Harbour Orchard Mirror")
)


def _people(draw: Random, count: int) -> list[str]:
    return draw.sample([f"{name} {surname}" for name in _NAMES for surname in _SURNAMES], count)


# Weather: read what the days were like.


def _weather(category: str, draw: Random) -> Problem:
    cities = draw.sample(_CITIES, 4)
    store: Store = {}
    for city in cities:
        degrees = draw.sample(range(-5, 35), len(_DATES))
        for date, degree in zip(_DATES, degrees, strict=True):
            store[f"{city} {date}"] = {"temperature": str(degree), "wind": str(draw.randrange(60))}
    calls: tuple[Call, ...]
    city, date = draw.choice(cities), draw.choice(_DATES)
    store["here"] = {"city": city, "date": date}
    field = draw.choice(("temperature", "wind"))
    if category == "here":
        calls = (call("where_am_i"), call("weather", city=city, date=date))
        return Problem(
            f"What is the {field} where I am, today?", store, calls, store[f"{city} {date}"][field]
        )
    if category == "change":
        first, last = sorted(draw.sample(_DATES, 2))
        calls = tuple(call("weather", city=city, date=date) for date in (first, last))
        rise = int(store[f"{city} {last}"]["temperature"]) - int(
            store[f"{city} {first}"]["temperature"]
        )
        goal = f"By how many degrees did the temperature in {city} rise from {first} to {last}? A fall is below 0."
        return Problem(goal, store, calls, str(rise))
    start = draw.randrange(5)
    dates = _DATES[start : start + 3]
    warmest = max(dates, key=lambda date: int(store[f"{city} {date}"]["temperature"]))
    calls = tuple(call("weather", city=city, date=date) for date in dates)
    return Problem(
        f"Which of the days {join_names(dates)} was the warmest in {city}?", store, calls, warmest
    )


WEATHER = Domain(
    (
        Tool(
            "where_am_i",
            (),
            "the city where the user is, and today's date",
            lambda store: format_fields(store["here"]),
        ),
        Tool(
            "weather",
            ("city", "date"),
            "the temperature and the wind in a city on a date such as 2024-05-01",
            lambda store, city, date: show(store, f"{city} {date}"),
        ),
    ),
    ("here", "change", "warmest"),
    _weather,
    train=323,
)


# To-do lists: change what is to be done.


def _todo(category: str, draw: Random) -> Problem:
    jobs = [
        f"{verb} the {thing}"
        for verb in words("clean fix paint sell")
        for thing in words("bike fence lamp roof sofa")
    ]
    projects = draw.sample(words("home office garden travel school"), 3)
    store = {
        job: {
            "project": draw.choice(projects),
            "due": draw.choice(_DATES),
            "status": draw.choice(("open", "done")),
        }
        for job in draw.sample(jobs, 8)
    }
    job, project, date = draw.choice(list(store)), draw.choice(projects), draw.choice(_DATES)
    project = store[job]["project"]
    tasks = call("list_tasks", project=project)
    if category == "count":
        count = sum(row["project"] == project and row["status"] == "open" for row in store.values())
        return Problem(
            f"How many tasks of the project {project} are open?", store, (tasks,), str(count)
        )
    if category == "complete":
        for row in (store[job], *draw.sample(list(store.values()), 2)):
            row["status"] = "open"
        mine = [
            name
            for name, row in store.items()
            if row["project"] == project and row["status"] == "open"
        ]
        done = tuple(call("complete_task", name=name) for name in mine)
        return Problem(f"Complete every open task of the project {project}.", store, (tasks, *done))
    if category == "postpone":
        store[job]["due"], later = _DATES[0], draw.choice(_DATES[1:])
        mine = [
            name
            for name, row in store.items()
            if row["project"] == project and row["due"] == _DATES[0]
        ]
        moved = tuple(call("set_due", name=name, date=later) for name in mine)
        goal = f"Set the due date of all tasks of the project {project} that are due on {_DATES[0]} to {later}."
        return Problem(goal, store, (tasks, *moved))
    new = draw.choice([job for job in jobs if job not in store])
    goal = f"Add the task {new!r} to the project {project}, due on {date}, and delete the task {job!r}."
    return Problem(
        goal,
        store,
        (call("add_task", name=new, project=project, date=date), call("delete_task", name=job)),
    )


def _tasks(store: Store, project: str) -> str:
    mine = [
        f"{name} ({row['status']}, due {row['due']})"
        for name, row in store.items()
        if row["project"] == project
    ]
    return join_names(mine)


def _add(store: Store, name: str, project: str, date: str) -> str:
    if name in store:
        raise ToolError(f"there is a task {name!r} already")
    store[name] = {"project": project, "due": date, "status": "open"}
    return "Added."


def _delete(store: Store, name: str) -> str:
    find_row(store, name)
    del store[name]
    return "Deleted."


def _set(store: Store, key: str, field: str, value: str) -> str:
    find_row(store, key)[field] = value
    return "Done."


TODO = Domain(
    (
        Tool(
            "list_projects",
            (),
            "the projects",
            lambda store: join_names(dict.fromkeys(r["project"] for r in store.values())),
        ),
        Tool("list_tasks", ("project",), "the tasks of a project", _tasks),
        Tool("add_task", ("name", "project", "date"), "add an open task with a due date", _add),
        Tool(
            "complete_task",
            ("name",),
            "mark a task as done",
            lambda store, name: _set(store, name, "status", "done"),
        ),
        Tool(
            "set_due",
            ("name", "date"),
            "set a task's due date",
            lambda store, name, date: _set(store, name, "due", date),
        ),
        Tool("delete_task", ("name",), "delete a task", _delete),
    ),
    ("count", "complete", "postpone", "replace"),
    _todo,
    train=135,
)


# Sheets: compute and write cells. A row of the store is a row of the sheet, a field is a column.


def _sheet(category: str, draw: Random) -> Problem:
    goods = draw.sample(words("apples bread cheese dates eggs flour grapes honey"), 5)
    store: Store = {"1": {"A": "item", "B": "price", "C": "amount", "D": ""}}
    for number, good in enumerate(goods, 2):
        store[str(number)] = {
            "A": good,
            "B": str(draw.randrange(1, 30)),
            "C": str(draw.randrange(1, 20)),
            "D": "",
        }
    look, number = call("read_sheet"), draw.randrange(2, 7)
    if category == "total":
        column, name = draw.choice((("B", "prices"), ("C", "amounts")))
        total = sum(int(store[str(number)][column]) for number in range(2, 7))
        return Problem(
            f"Write the sum of the {name} into cell D1.", store, (look, _write("D1", total))
        )
    if category == "product":
        chosen = sorted(draw.sample(range(2, 7), 3))
        products = {
            number: int(store[str(number)]["B"]) * int(store[str(number)]["C"]) for number in chosen
        }
        goal = f"Write price times amount into column D, in the rows {join_names(map(str, chosen))} only."
        return Problem(
            goal,
            store,
            (look, *(_write(f"D{number}", product) for number, product in products.items())),
        )
    row, more = store[str(number)], draw.randrange(2, 10)
    goal = f"Raise the price of {row['A']} by {more}, and set its amount to 0."
    return Problem(
        goal, store, (look, _write(f"B{number}", int(row["B"]) + more), _write(f"C{number}", 0))
    )


def _write(cell: str, value: int) -> Call:
    return call("write_cell", cell=cell, value=str(value))


def _cell(cell: str) -> tuple[str, str]:
    """Return the row and the column that a cell such as B2 names."""
    return cell[1:], cell[:1].upper()


def _read_cell(store: Store, cell: str) -> str:
    row, column = _cell(cell)
    return find_row(store, row).get(column, "") or "(empty)"


def _write_cell(store: Store, cell: str, value: str) -> str:
    row, column = _cell(cell)
    if column not in find_row(store, row):
        raise ToolError(f"there is no column {column!r}")
    return _set(store, row, column, value)


def _read_sheet(store: Store) -> str:
    return "\n".join(f"{number} | {' | '.join(row.values())}" for number, row in store.items())


SHEET = Domain(
    (
        Tool("read_sheet", (), "all rows, with the columns A to D", _read_sheet),
        Tool("read_cell", ("cell",), "one cell, such as B2", _read_cell),
        Tool("write_cell", ("cell", "value"), "set a cell to a text or a number", _write_cell),
    ),
    ("total", "product", "change"),
    _sheet,
    train=100,
)


# Films, and papers: follow what is said of one to another.


def _movie(category: str, draw: Random) -> Problem:
    people, titles = _people(draw, 6), draw.sample(_TITLES, 6)
    ratings = draw.sample(range(40, 99), 6)
    store: Store = {
        name: {"born": str(draw.randrange(1900, 1990)), "country": draw.choice(_CITIES)}
        for name in people
    }
    for title, rating in zip(titles, ratings, strict=True):
        director, star = draw.sample(people, 2)
        store[title] = {
            "director": director,
            "star": star,
            "year": str(draw.randrange(1950, 2020)),
            "rating": str(rating),
        }
    one, other = draw.sample(titles, 2)
    if category == "rating":
        better = max((one, other), key=lambda title: int(store[title]["rating"]))
        calls = (call("film", title=one), call("film", title=other))
        return Problem(f"Which film has the higher rating, {one} or {other}?", store, calls, better)
    role = draw.choice(("director", "star"))
    person = store[one][role]
    calls = (call("film", title=one), call("person", name=person))
    field = {
        "born": "In which year was the {} of {} born?",
        "origin": "From which country is the {} of {}?",
    }[category]
    answer = store[person]["born" if category == "born" else "country"]
    return Problem(field.format(role, one), store, calls, answer)


MOVIE = Domain(
    (
        Tool("film", ("title",), "a film's director, star, year and rating", show),
        Tool("person", ("name",), "when and where somebody was born", show),
    ),
    ("rating", "born", "origin"),
    _movie,
    train=218,
)


def _academia(category: str, draw: Random) -> Problem:
    people = _people(draw, 5)
    topics = [
        f"{what} of {subject}"
        for what in words("Theory Limits Models")
        for subject in words("graphs proteins markets lattices")
    ]
    store: Store = {name: {"institute": f"Institute of {draw.choice(_CITIES)}"} for name in people}
    for title, cited in zip(draw.sample(topics, 6), draw.sample(range(5, 900), 6), strict=True):
        first, second = draw.sample(people, 2)
        store[title] = {
            "first author": first,
            "second author": second,
            "year": str(draw.randrange(1990, 2024)),
        }
        store[title]["citations"] = str(cited)
    papers = [name for name, row in store.items() if "citations" in row]
    paper = draw.choice(papers)
    if category == "institute":
        author = store[paper]["first author"]
        calls = (call("paper", title=paper), call("author", name=author))
        return Problem(
            f"Where does the first author of {paper!r} work?",
            store,
            calls,
            store[author]["institute"],
        )
    author = store[paper]["first author"]
    mine = [title for title in papers if author in store[title].values()]
    reads = tuple(call("paper", title=title) for title in mine)
    if category == "cited":
        most = max(mine, key=lambda title: int(store[title]["citations"]))
        return Problem(
            f"Which paper of {author} is cited most?",
            store,
            (call("papers_of", name=author), *reads),
            most,
        )
    total = sum(int(store[title]["citations"]) for title in mine)
    goal = f"How many citations do the papers of {author} have in all?"
    return Problem(goal, store, (call("papers_of", name=author), *reads), str(total))


def _list_papers(store: Store, name: str) -> str:
    find_row(store, name)
    return join_names(title for title, row in store.items() if name in row.values())


ACADEMIA = Domain(
    (
        Tool("paper", ("title",), "a paper's authors, year and citations", show),
        Tool("author", ("name",), "where somebody works", show),
        Tool("papers_of", ("name",), "the titles of somebody's papers", _list_papers),
    ),
    ("institute", "cited", "citations"),
    _academia,
    train=100,
)
