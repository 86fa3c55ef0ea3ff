"""A chat product over pycontext: POST a message, its reply is streamed back. `uvicorn app:app --workers 4`.

PYCONTEXT_DSN names the database; MODEL, OPENAI_BASE_URL and OPENAI_API_KEY the model.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from openai import AsyncOpenAI, OpenAIError
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

import pycontext

MODEL = os.environ.get("MODEL", "gpt-4.1-mini")
PROFILE = os.environ.get("PROFILE", "default")
PROMPT = "You answer for a bookshop."


class Message(BaseModel):
    id: str
    user: str
    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncConnectionPool(os.environ["PYCONTEXT_DSN"], min_size=1, max_size=8) as pool:
        app.state.db = pycontext.aconnect(pool=pool)
        app.state.client = AsyncOpenAI()
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(pycontext.PycontextError)
async def refused(request: Request, error: pycontext.PycontextError) -> JSONResponse:
    return JSONResponse({"error": error.message, "detail": error.detail, "hint": error.hint}, 400)


@app.exception_handler(OpenAIError)
async def unanswered(request: Request, error: OpenAIError) -> JSONResponse:
    return JSONResponse({"error": "the model does not answer; send the message again"}, 502)


@app.post("/chats/{chat_id}/messages")
async def send(chat_id: str, message: Message) -> StreamingResponse:
    """Answer a message. Sent again under its id, it is stored once, and so is its reply."""
    reply = _reply(app.state.db, app.state.client, chat_id, message)
    first = await anext(reply, "")  # what goes wrong before the reply begins is an error of its own
    return StreamingResponse(_all(first, reply), media_type="text/plain; charset=utf-8")


async def _all(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in rest:
        yield piece


async def _reply(
    db: pycontext.AsyncDatabase, client: AsyncOpenAI, chat_id: str, message: Message
) -> AsyncIterator[str]:
    reply_id = f"{message.id}/reply"
    await db.create_chat(chat_id, system_prompt=PROMPT, profile=PROFILE, owner=message.user)
    async with db.turn(chat_id, message.text, message_id=message.id, recall=True) as turn:
        if turn.is_answered:
            yield turn.reply or ""
            return
        stream = await client.chat.completions.create(model=MODEL, messages=turn.messages, stream=True)
        said = []
        async for piece in pycontext.ascrub_stream(_texts(stream)):
            said.append(piece)
            yield piece
        with suppress(
            pycontext.MessageIdReused
        ):  # the same request sent twice at once: the first reply stays
            await turn.add({"role": "assistant", "content": "".join(said), "message_id": reply_id})


async def _texts(stream: Any) -> AsyncIterator[str | None]:
    async for chunk in stream:
        if chunk.choices:
            yield chunk.choices[0].delta.content
