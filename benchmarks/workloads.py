"""Workloads: each takes a client and the number of a round, and returns its figures by name.

The texts of a round are the same for all servers, and new to them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from threading import Thread

from benchmarks.client import Client, Messages, Sample

Figures = dict[str, float]
Workload = Callable[[Client, int], Figures]

WORDS = """
    water house garden letter market window bridge captain summer winter travel doctor music paper stone river
    kitchen teacher silver engine morning village forest castle harbour sister engineer mountain library question
    answer silence the a of and to in is was for on with as by at from that this it not are be or had which one
    you were all she he they
""".split()


def text(seed: str, words: int) -> str:
    """Plain sentences that depend on the seed."""
    rng = random.Random(seed)
    out: list[str] = []
    while len(out) < words:
        sentence = [rng.choice(WORDS) for _ in range(rng.randrange(6, 14))]
        out += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return " ".join(out[:words])


def _system(seed: str, words: int) -> Messages:
    return [{"role": "system", "content": text(seed, words)}]


def _turn(client: Client, chat: Messages, question: str, tokens: int) -> Sample:
    chat.append({"role": "user", "content": question})
    sample = client.chat(chat, tokens)
    chat.append({"role": "assistant", "content": sample.text})
    return sample


def cold(client: Client, number: int) -> Figures:
    """A new prompt of about 1,500 tokens."""
    sample = client.chat([*_system(f"cold {number}", 1250), {"role": "user", "content": "Begin."}], 2)
    return {"cold prompt: time to first token, s": sample.ttft, "cold prompt: tokens computed": sample.computed}


def other_question(client: Client, number: int) -> Figures:
    """Questions of 40 words behind one document of about 1,900 tokens. Each is a conversation of its own."""
    document = _system(f"document {number}", 1700 + 11 * number)  # parts at another place of a block
    samples = [client.chat([*document, {"role": "user", "content": text(f"{number} {ask}", 40)}], 8) for ask in range(6)]
    return {
        "other question behind 1,900 tokens: time to first token, s": statistics.median(sample.ttft for sample in samples[1:]),
        "other question behind 1,900 tokens: tokens computed": sum(sample.computed for sample in samples[1:]),
    }


def accumulate(client: Client, number: int) -> Figures:
    """Ten turns of one chat, replies sent back verbatim."""
    chat = _system(f"accumulate {number}", 240)
    begun = time.perf_counter()
    samples = [_turn(client, chat, text(f"{number} {turn}", 24), 24) for turn in range(10)]
    later = samples[1:]
    return {
        "10 turns: wall, s": time.perf_counter() - begun,
        "10 turns: time to first token of turns 2-10, s": statistics.median(sample.ttft for sample in later),
        "10 turns: tokens computed": sum(sample.computed for sample in samples),
    }


def users(client: Client, number: int) -> Figures:
    """16 users in turn, three times, on 4 slots; all under one system prompt. About 490 tokens a prompt."""
    chats = [_system(f"users {number}", 225) for _ in range(16)]
    begun = time.perf_counter()
    samples = [
        _turn(client, chat, text(f"{number} {turn} {user}", 100), 8) for turn in range(3) for user, chat in enumerate(chats)
    ]
    return {
        "16 users x 3 turns on 4 slots: wall, s": time.perf_counter() - begun,
        "16 users x 3 turns on 4 slots: tokens computed": sum(sample.computed for sample in samples),
        "16 users x 3 turns on 4 slots: prompt tokens": sum(sample.prompt for sample in samples),
    }


def decode_one(client: Client, number: int) -> Figures:
    sample = client.chat([{"role": "user", "content": text(f"one {number}", 30)}], 160)
    return {"decode, 1 stream: tokens/s": sample.rate}


def decode_four(client: Client, number: int) -> Figures:
    prompts: list[Messages] = [[{"role": "user", "content": text(f"four {number} {n}", 30)}] for n in range(4)]
    samples = client.together(prompts, 128)
    # Only while all four are running: from the last first token to the first last token.
    begun, ended = max(sample.at[0] for sample in samples), min(sample.at[-1] for sample in samples)
    tokens = sum(1 for sample in samples for at in sample.at if begun < at <= ended)
    return {"decode, 4 streams: tokens/s": tokens / (ended - begun)}


def stall(client: Client, number: int) -> Figures:
    """Gaps in a running reply while another prompt of about 1,500 tokens is prefilled."""
    running: list[Sample] = []
    thread = Thread(target=lambda: running.append(client.chat([{"role": "user", "content": text(f"run {number}", 20)}], 200)))
    thread.start()
    time.sleep(0.5)
    client.chat([*_system(f"stall {number}", 1250), {"role": "user", "content": "Begin."}], 2)
    thread.join()
    gaps = sorted(running[0].gaps)
    return {
        "reply beside a prefill: p99 gap, s": gaps[int(0.99 * (len(gaps) - 1))],
        "reply beside a prefill: longest gap, s": gaps[-1],
    }


WORKLOADS: dict[str, Workload] = {
    "cold": cold,
    "other-question": other_question,
    "accumulate": accumulate,
    "users": users,
    "decode-1": decode_one,
    "decode-4": decode_four,
    "stall": stall,
}
