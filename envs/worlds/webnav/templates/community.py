"""Templates about the code host and the forum (WebArena's GitLab and Reddit)."""

from random import Random

from horizonrl.envs.worlds.webnav.task import Task, Type
from horizonrl.envs.worlds.webnav.templates.shared import (
    draw_issue,
    draw_post,
    including,
    number,
    people,
    post_added,
)
from horizonrl.envs.worlds.webnav.world import (
    LABELS,
    ME,
    QUESTIONS,
    REMARKS,
    SUBJECTS,
    Issue,
    World,
)


def create_issue(world: World, draw: Random) -> Task:
    name, label = draw.choice([*world.repos]), draw.choice(LABELS)
    title = f"Support for {draw.choice(SUBJECTS)}"
    chosen = () if label == LABELS[0] else (label,)
    form = ("New Issue", Type("Title", title), *chosen, "Create Issue")
    return Task(
        f'Create an issue in {name} with the title "{title}" and the label {label}.',
        (name, "Issues", *form),
        effect=lambda w: w.repos[name].issues.append(Issue(title, ME, label)),
    )


def close_issue(world: World, draw: Random) -> Task | None:
    name, index, issue = draw_issue(world, draw)
    if not issue.open:
        return None
    plan = (name, "Issues", issue.title, "Close Issue")
    effect = lambda w: setattr(w.repos[name].issues[index], "open", False)  # noqa: E731
    return Task(f'Close the issue "{issue.title}" of {name}.', plan, effect=effect)


def assign_issue(world: World, draw: Random) -> Task:
    name, index, issue = draw_issue(world, draw)
    member = draw.choice([*world.repos[name].commits])
    plan = (name, "Issues", issue.title, member, "Save")
    effect = lambda w: setattr(w.repos[name].issues[index], "assignee", member)  # noqa: E731
    return Task(f'Assign the issue "{issue.title}" of {name} to {member}.', plan, effect=effect)


def open_issues_of_label(world: World, draw: Random) -> Task:
    name, label = draw.choice([*world.repos]), draw.choice(LABELS)
    issues = [issue for issue in world.repos[name].issues if issue.open and issue.label == label]
    plan = (name, "Issues")
    return Task(
        f"How many open issues of {name} have the label {label}?", plan, number(len(issues))
    )


def author_of_issue(world: World, draw: Random) -> Task:
    name, _, issue = draw_issue(world, draw)
    plan = (name, "Issues", issue.title)
    return Task(
        f'Who wrote the issue "{issue.title}" of {name}?',
        plan,
        including(issue.author, people(world)),
    )


def top_committer(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])
    commits = world.repos[name].commits
    top = max(commits, key=lambda member: commits[member])
    plan = (name, "Contributors")
    return Task(f"Who has the most commits in {name}?", plan, including(top, people(world)))


def stars_of_repo(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])
    return Task(f"How many stars has {name}?", (name,), number(world.repos[name].stars))


def star_repo(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])

    def effect(fresh: World) -> None:
        fresh.repos[name].stars += 1
        fresh.repos[name].starred = True

    return Task(f"Star {name}.", (name, "Star"), effect=effect)


def upvote_post(world: World, draw: Random) -> Task:
    forum, index, post = draw_post(world, draw)

    def effect(fresh: World) -> None:
        fresh.forums[forum][index].votes += 1
        fresh.forums[forum][index].voted = True

    plan = (forum, post.title, "Upvote")
    return Task(f'Upvote the post "{post.title}" in {forum}.', plan, effect=effect)


def comment_on_post(world: World, draw: Random) -> Task:
    forum, index, post = draw_post(world, draw)
    words = draw.choice(REMARKS)
    plan = (forum, post.title, Type("Comment", words, enter=True))
    effect = lambda w: w.forums[forum][index].comments.append((ME, words))  # noqa: E731
    return Task(f'Reply "{words}" to the post "{post.title}" in {forum}.', plan, effect=effect)


def create_post(world: World, draw: Random) -> Task:
    forum, title = (
        draw.choice([*world.forums]),
        draw.choice(QUESTIONS).format(draw.choice(SUBJECTS)),
    )
    plan = (forum, "New Post", Type("Title", title, enter=True))
    return Task(
        f'Create a post in {forum} with the title "{title}".', plan, effect=post_added(forum, title)
    )


def top_post(world: World, draw: Random) -> Task:
    forum = draw.choice([*world.forums])
    posts = world.forums[forum]
    answer = including(
        max(posts, key=lambda post: post.votes).title, (post.title for post in posts)
    )
    return Task(f"What is the title of the post with the most votes in {forum}?", (forum,), answer)
