"""`pycontext chat`: talk to a model in the terminal, with the memory underneath and in sight."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any

import psycopg
import typer
from rich.text import Text

import pycontext
from pycontext.cli import show, target
from pycontext.cli.terminal import Failed, number, out, printable, report, reported, visible
from pycontext.messages import identity
from pycontext.models import ModelClient, ModelFailed

VARIABLES = ("PYCONTEXT_CHAT_MODEL", "PYCONTEXT_CHAT_BASE_URL", "OPENAI_API_KEY")

_ROUNDS = 8
"""How often the model may call tools before it has to answer."""

_HELP = """\
/window            what the model reads now
/explain [WORDS]   of every row (with these words): whether it is read, in what form, why
/compact [FOCUS]   summarize now what may be cut
/start-over [NOTE] the model reads nothing from above here, but the note
/pin [#SEQ]        keep a message in every window (no #SEQ: what you said last); /unpin #SEQ
/memory [WORDS]    what is remembered (and past messages with these words)
/help, /quit"""


def chat_command(
    chat: Annotated[
        str | None,
        typer.Argument(metavar="CHAT", help="The chat's id. Default: a new chat.", show_default=False),
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            metavar="DSN",
            help="The database. Default: PYCONTEXT_DSN, then DATABASE_URL, else the embedded server.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help=f"Default: {VARIABLES[0]}.", show_default=False),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help=f"A server that speaks OpenAI's protocol. Default: {VARIABLES[1]}, else OpenAI.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            min=1,
            metavar="TOKENS",
            help="Of the window. Default: the profile's.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="The profile of a chat that is new.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system prompt of a chat that is new.")
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="NAME", help="Whose memory a new chat shares with his other chats."),
    ] = None,
    has_tools: Annotated[
        bool, typer.Option("--tools/--no-tools", help="Offer the model tools for the memory.")
    ] = True,
) -> None:
    """Talk to a model, with this memory underneath. /help lists what can be asked of the memory."""
    with reported():
        client = _client(model, base_url)
        name = identity(chat or datetime.now().strftime("chat-%Y%m%d-%H%M%S"))
        with pycontext.connect(target.find(dsn).dsn) as db:
            db.create_chat(name, system_prompt=system, profile=profile, owner=owner)
            out().print(
                f"chat {visible(name)} with {visible(client.model)}; /help, /quit", style="bright_black"
            )
            Talk(db, name, client, budget, has_tools).run(_lines())


def _client(model: str | None, base_url: str | None) -> ModelClient:
    name, url = model or os.environ.get(VARIABLES[0]), base_url or os.environ.get(VARIABLES[1])
    if not name:
        raise Failed(
            "no model to talk to",
            detail=f"neither --model nor {VARIABLES[0]} is given",
            hint=f"set {VARIABLES[0]} and {VARIABLES[2]}; for a server of your own that speaks OpenAI's"
            f" protocol {VARIABLES[1]}, such as http://localhost:8080/v1, in place of the key",
        )
    client = ModelClient("chat", name, base_url=url or None, api_key=None, timeout=120, max_retries=2)
    try:
        client.open()
    except ModelFailed as error:
        hint = f"set {VARIABLES[2]}, or name a server with {VARIABLES[1]}"
        raise Failed("no model to talk to", detail=error.reason, hint=hint) from None
    return client


def _lines() -> Iterator[str]:
    """What the user types, a line each, to the end of input."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text ends no conversation
    if is_terminal:
        import readline  # noqa: F401  arrow keys and history
    while True:
        try:
            yield input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return


class Talk:
    """One conversation in the terminal."""

    def __init__(
        self, db: pycontext.Database, chat: str, client: ModelClient, budget: int | None, has_tools: bool
    ) -> None:
        self.db = db
        self.chat = chat
        self.client = client
        self.budget = budget
        self.tools = db.tools(chat)
        self.schemas = self.tools.schemas() if has_tools else []
        self.commands: Mapping[str, Callable[[str], None]] = {
            "window": self._window,
            "explain": self._explain,
            "compact": self._compact,
            "start-over": self._start_over,
            "pin": self._pin,
            "unpin": self._unpin,
            "memory": self._memory,
            "help": lambda _: out().print(_HELP),
        }

    def run(self, lines: Iterable[str]) -> None:
        """Answer line by line. What goes wrong with one is told, and the next is read."""
        for line in map(str.strip, lines):
            if line in ("/quit", "/exit"):
                return
            try:
                if line.startswith("/"):
                    self._command(*line[1:].split(maxsplit=1))
                elif line:
                    self._answer(line)
            except pycontext.PycontextError as error:
                report(error)
            except ModelFailed as error:
                report(Failed(error.reason))
            except psycopg.Error as error:
                report(Failed(error.diag.message_primary or str(error).strip()))

    def _command(self, name: str = "", argument: str = "") -> None:
        if name not in self.commands:
            raise Failed(f"there is no /{visible(name)}", hint="/help lists what there is")
        self.commands[name](argument)

    def _answer(self, text: str) -> None:
        """One turn: recall, stream the reply, run the tools it calls, until it says something."""
        with self.db.turn(self.chat, text, tools=self.schemas, token_budget=self.budget, recall=True) as turn:
            for _ in range(_ROUNDS):
                reply = self._reply(turn)
                turn.add(reply)
                calls = reply.get("tool_calls", ())
                if not calls:
                    break
                turn.add([self._result(call) for call in calls])
            else:
                raise ModelFailed(f"the model called tools {_ROUNDS} times and gave no answer")
        self._status()

    def _reply(self, turn: pycontext.Turn) -> dict[str, Any]:
        """Stream one reply to the terminal, and return it as a message.

        Ctrl-C, or the end of the server, ends it where it is.
        Where the model has no room for the prompt it is compacted, once, and sent again.
        """
        import openai

        said: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        used: dict[str, Any] = {}
        cut: KeyboardInterrupt | ModelFailed | None = None
        options: Any = {"model": self.client.model, "messages": turn.messages, "stream": True}
        options["stream_options"] = {"include_usage": True}
        if self.schemas:
            options["tools"] = self.schemas
        try:
            with self.client.asking() as client, client.chat.completions.create(**options) as stream:
                for piece in pycontext.scrub_stream(_texts(stream, calls, used)):
                    said.append(piece)
                    out().file.write(printable(piece))
                    out().file.flush()
        except openai.APIStatusError as error:
            if turn.make_room(error):
                return self._reply(turn)
            raise Failed(
                f"the model server answered with status {error.status_code}", detail=error.message
            ) from error
        except (KeyboardInterrupt, ModelFailed) as error:
            if not said and isinstance(error, ModelFailed):
                raise
            cut = error
        finally:
            if said:
                out().file.write("\n")
        if cut is not None:  # what was shown is kept
            calls.clear()
            said.append(" […]")
        if isinstance(cut, ModelFailed):
            report(Failed(cut.reason, hint="the reply is kept as far as it came"))
        if calls:
            tool_calls = list(calls.values())
            return {"role": "assistant", "content": "".join(said) or None, "tool_calls": tool_calls, **used}
        if not said:
            raise ModelFailed("the model said nothing")
        return {"role": "assistant", "content": "".join(said), **used}

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        out().print(f"→ {visible(function['name'])} {visible(function['arguments'])}", style="bright_black")
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": self.tools.call(function["name"], function["arguments"]),
        }

    def _status(self) -> None:
        """The budget in a line."""
        status = self.db.status(self.chat)
        limit = self.budget or status.token_budget
        rows = self.db.window(self.chat, self.budget)
        line = show.bar(out(), rows, limit, 30)
        line.append(f" {number(show.window_tokens(rows))} of {number(limit)} tokens, #{status.last_seq}")
        if status.line_origin == "compaction":
            line.append(f", summary up to #{status.line_seq}")
        out().print(line)

    def _window(self, _: str) -> None:
        limit = self.budget or self.db.status(self.chat).token_budget
        show.window(out(), self.db.window(self.chat, self.budget), limit, f"window of {self.chat}")

    def _explain(self, words: str) -> None:
        show.explanation(out(), self.db.explain(self.chat, self.budget, search=words or None))

    def _compact(self, focus: str) -> None:
        show.a_pass(out(), self.db.compact(self.chat, self.budget, focus or None))

    def _start_over(self, note: str) -> None:
        line = self.db.start_over(self.chat, note or None)
        out().print(f"started over after #{line.seq}")

    def _pin(self, place: str) -> None:
        pin = self.db.pin(self.chat, self._message_id(place))
        out().print(f"#{pin.seq} is pinned")

    def _unpin(self, place: str) -> None:
        is_off = self.db.unpin(self.chat, self._message_id(place))
        out().print("unpinned" if is_off else "it is not pinned")

    def _message_id(self, place: str) -> str:
        if place:
            if not place.removeprefix("#").isdecimal():
                raise Failed("a message is named by its number", hint="/pin #12")
            rows = self.db.original(self.chat, int(place.removeprefix("#")))
        else:
            rows = [row for row in self.db.thread(self.chat)[::-1] if row.role == "user"]
        found = next((row.message_id for row in rows if row.kind == "message"), None)
        if found is None:
            raise Failed("there is no such message", hint="/window shows the numbers")
        return found

    def _memory(self, words: str) -> None:
        rows = self.db.recall(self.chat, words or None, max_rows=50)
        for row in rows:
            source = row.fact_id or f"#{row.seq} of {row.chat_id}"
            out().print(Text.assemble((visible(source), "bright_black"), f"  {visible(row.content)}"))
        if not rows:
            out().print("nothing is remembered" + (" that fits" if words else ""))


def _texts(
    stream: Iterable[Any], calls: dict[int, dict[str, Any]], used: dict[str, Any]
) -> Iterator[str | None]:
    """The text of a stream; the calls in it are put together in `calls`, its usage goes into `used`."""
    for chunk in stream:
        if chunk.usage is not None:
            used.update(model=chunk.model, usage={"prompt_tokens": chunk.usage.prompt_tokens})
        delta = chunk.choices[0].delta if chunk.choices else None
        if delta is None:
            continue
        for part in delta.tool_calls or ():
            empty = {
                "id": f"call_{part.index}",
                "type": "function",
                "function": {"name": "", "arguments": ""},
            }
            call = calls.setdefault(part.index, empty)
            call["id"] = part.id or call["id"]
            if part.function is not None:
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
        yield delta.content or delta.refusal
