# SPDX-License-Identifier: Apache-2.0
"""Answers from a model: whole, as they come, as JSON, and many at once that share a prompt.

usage: generate.py [MODEL]     by default what `./run fetch-model` fetched
"""

import json
import os
import sys
import threading

import persistentkv as pkv

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEFAULT = os.path.join(ROOT, ".cache", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else DEFAULT
    if not os.path.exists(path):
        print(f"no model at {path}")
        return 77
    try:
        engine = pkv.Engine(path, max_seq_len=1024)
    except pkv.NotSupported as e:
        print(e)
        return 77
    with engine:
        print("whole :", engine.generate("The capital of France is", max_tokens=8).text.strip())

        print("stream:", end="", flush=True)
        for piece in engine.stream("Roses are red,", max_tokens=16, temperature=0.7, seed=1):
            print(piece.text, end="", flush=True)
        print()

        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }
        answer = engine.chat(
            [{"role": "user", "content": "Invent a person, as JSON."}], schema=schema, max_tokens=60
        )
        print("schema:", json.loads(answer.text))

        # Every thread's request joins the same batch; their common beginning is computed once.
        rules = "You are a terse assistant who answers in one short sentence. " * 8
        questions = ["What is rain?", "What is snow?", "What is fog?", "What is hail?"]
        answers = [""] * len(questions)

        def ask(i: int) -> None:
            turns = [
                {"role": "system", "content": rules},
                {"role": "user", "content": questions[i]},
            ]
            answers[i] = engine.chat(turns, max_tokens=24).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for question, said in zip(questions, answers):
            print(f"{question} {said}")
        stats = engine.stats
        print(f"{stats['prompt_tokens_reused']} of {stats['prompt_tokens']} prompt tokens reused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
