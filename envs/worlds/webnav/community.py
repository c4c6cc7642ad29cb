"""The forum and the code host (WebArena's Reddit and GitLab)."""

from collections.abc import Sequence
from typing import TypeVar

from horizonrl.envs.worlds.webnav.page import Element, button, combobox, link, text, textbox
from horizonrl.envs.worlds.webnav.sites import Body, Site
from horizonrl.envs.worlds.webnav.world import LABELS, ME, Issue, Post, Repo

T = TypeVar("T")


class Forum(Site):
    host, title = "forum", "Forum"

    def nav(self) -> Sequence[Element]:
        return [link(name, f"/f/{name}") for name in self.world.forums]

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        match path:
            case ["f", name] if posts := self.world.forums.get(name):
                lines: list[Element] = []
                for index, entry in reversed([*enumerate(posts, 1)]):
                    lines += [
                        link(entry.title, f"/f/{name}/{index}"),
                        text(f"by {entry.author}, {entry.votes} votes"),
                    ]
                return name, [link("New Post", f"/f/{name}/new"), *lines]
            case ["f", name, "new"] if name in self.world.forums:
                return f"New post in {name}", [
                    textbox("Title"),
                    button("Create Post", f"/f/{name}/new"),
                ]
            case ["f", name, number] if post := find_numbered(
                self.world.forums.get(name, ()), number
            ):
                path_of = f"/f/{name}/{number}"
                vote = [] if post.voted else [button("Upvote", f"{path_of}/vote")]
                comments = [text(f"{author}: {words}") for author, words in post.comments]
                reply = [textbox("Comment"), button("Reply", f"{path_of}/reply")]
                return post.title, [
                    text(f"by {post.author}, {post.votes} votes"),
                    *vote,
                    *comments,
                    *reply,
                ]
        return None

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        match path:
            case ["f", name, "new"]:
                posts = self.world.forums[name]
                posts.append(Post(fields["Title"].strip(), ME, 1, voted=True))
                return f"/f/{name}/{len(posts)}", "Your post is created."
            case ["f", name, number, "vote"]:
                post = self.world.forums[name][int(number) - 1]
                if not post.voted:
                    post.votes, post.voted = post.votes + 1, True
                return f"/f/{name}/{number}", ""
            case ["f", name, number, "reply"]:
                self.world.forums[name][int(number) - 1].comments.append(
                    (ME, fields["Comment"].strip())
                )
                return f"/f/{name}/{number}", ""
        return None


class Code(Site):
    host, title = "code", "Code"

    def nav(self) -> Sequence[Element]:
        return [link(name, f"/{name}") for name in self.world.repos]

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        match path:
            case [name, *rest] if repo := self.world.repos.get(name):
                return self._repo(name, repo, rest)
        return None

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        repo = self.world.repos[path[0]]
        match path:
            case [name, "star"]:
                if not repo.starred:
                    repo.stars, repo.starred = repo.stars + 1, True
                return f"/{name}", ""
            case [name, "issues", "new"]:
                repo.issues.append(Issue(fields["Title"].strip(), ME, fields["Label"]))
                return f"/{name}/issues/{len(repo.issues)}", "The issue is created."
            case [name, "issues", number, "close"]:
                repo.issues[int(number) - 1].open = False
                return f"/{name}/issues/{number}", ""
            case [name, "issues", number]:
                repo.issues[int(number) - 1].assignee = fields["Assignee"]
                return f"/{name}/issues/{number}", "Saved."
        return None

    def _repo(self, name: str, repo: Repo, path: list[str]) -> Body | None:
        match path:
            case []:
                star = [] if repo.starred else [button("Star", f"/{name}/star")]
                links = [
                    link(page, f"/{name}/{page.lower()}") for page in ("Issues", "Contributors")
                ]
                return name, [text(f"{repo.stars} stars"), *star, *links]
            case ["contributors"]:
                return f"Contributors of {name}", [
                    text(f"{who}: {n} commits") for who, n in repo.commits.items()
                ]
            case ["issues"]:
                lines: list[Element] = []
                for index, entry in reversed([*enumerate(repo.issues, 1)]):
                    lines += [
                        link(entry.title, f"/{name}/issues/{index}"),
                        text(f"{_state(entry)}, {entry.label}"),
                    ]
                return f"Issues of {name}", [link("New Issue", f"/{name}/issues/new"), *lines]
            case ["issues", "new"]:
                form = [textbox("Title"), combobox("Label", LABELS, LABELS[0])]
                return f"New issue in {name}", [
                    *form,
                    button("Create Issue", f"/{name}/issues/new"),
                ]
            case ["issues", number] if issue := find_numbered(repo.issues, number):
                path_of = f"/{name}/issues/{number}"
                facts = text(f"{_state(issue)}, {issue.label}, by {issue.author}")
                close = [button("Close Issue", f"{path_of}/close")] if issue.open else []
                assign = [
                    combobox("Assignee", tuple(repo.commits), issue.assignee),
                    button("Save", path_of),
                ]
                return issue.title, [facts, *close, *assign]
        return None


def find_numbered(records: Sequence[T], number: str) -> T | None:
    """Return the record of a number as an address has it, from 1."""
    return records[int(number) - 1] if number in map(str, range(1, len(records) + 1)) else None


def _state(issue: Issue) -> str:
    return "open" if issue.open else "closed"
