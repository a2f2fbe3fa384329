"""Runs genlm-control in its own environment: JSON in, JSON out, a line each.

    python genlm_worker.py

Settings are those that make it fast here: float32, K/V of the prompt cached, AWRS for a schema, and
no pause before a batch is run (its queries of a step all arrive together).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from genlm.control import AWRS, JsonSchema, PromptedLLM, direct_token_sampler
from genlm.control.constant import EOS
from memory import peak_bytes

END_TOKENS = [b"<|im_end|>", b"<|endoftext|>"]
ESS_THRESHOLD = 0.5


class Peer:
    """The model, and the constraints that were compiled for it."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.constraints: dict[str, Any] = {}

    def load(self, folder: str) -> dict[str, Any]:
        """Load the model from a folder."""
        self.llm = PromptedLLM.from_name(
            folder,
            backend="hf",
            eos_byte_strings=END_TOKENS,
            hf_opts={"torch_dtype": torch.float32, "device_map": None},
            timeout=0.0,
        )
        packages = ("genlm-control", "genlm-backend", "torch", "transformers")
        return {"versions": {name: version(name) for name in packages}}

    def encode(self, prompt: str) -> dict[str, Any]:
        """The prompt in the chat template."""
        ids = self.llm.model.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        return {"ids": ids}

    def constrain(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Compile a constraint."""
        constraint = JsonSchema(schema).coerce(self.llm, f=b"".join)
        self.constraints[json.dumps(schema)] = constraint
        return {}

    def answer(
        self,
        prompt: str,
        schema: dict[str, Any] | None,
        n_particles: int,
        max_tokens: int,
        seed: int,
    ) -> dict[str, Any]:
        """Answer one prompt; one of the particles is returned."""
        start = time.process_time()
        np.random.seed(seed)  # resampling draws from the global generator
        torch.manual_seed(seed)
        # Its log-probabilities are kept for good: the next answer must not find these.
        self.llm.model.clear_cache()
        ids = self.encode(prompt)["ids"]
        self.llm.model.cache_kv(ids)
        self.llm.prompt_ids = ids
        with tempfile.TemporaryDirectory() as folder:
            record = os.path.join(folder, "record.json")
            found = asyncio.run(self._smc(schema, n_particles, max_tokens, seed, record))
            with open(record, encoding="utf-8") as file:
                steps = json.load(file)
        if found.log_total > -np.inf:
            chosen = np.random.default_rng(seed).choice(len(found), p=found.normalized_weights)
        else:
            chosen = 0
        tokens = [token for token in found.contexts[chosen] if token is not EOS]
        return {
            "text": b"".join(bytes(token) for token in tokens).decode("utf-8", "replace"),
            "tokens": len(tokens),
            "sampled": sum(bool(p["contents_incr"]) for s in steps for p in s["particles"]),
            "ess_per_particle": float(np.mean([_ess(s) for s in steps])) / n_particles,
            "cpu_seconds": time.process_time() - start,
        }

    async def _smc(
        self, schema: dict[str, Any] | None, n: int, max_tokens: int, seed: int, record: str
    ) -> Any:
        if schema is None:
            # A cut text is an answer, as it is of the others: its own cap would weigh the end in.
            return await direct_token_sampler(self.llm).smc(
                n,
                ESS_THRESHOLD,
                max_tokens + 1,
                terminate_when=lambda context: len(context) >= max_tokens,
                json_path=record,
            )
        sampler = AWRS(self.llm, self.constraints[json.dumps(schema)], seed=seed)
        return await sampler.smc(n, ESS_THRESHOLD, max_tokens + 1, json_path=record)


def _ess(step: dict[str, Any]) -> float:
    log_w = np.array([float(p["logweight"]) for p in step["particles"]])
    if np.all(log_w == -np.inf):
        return 0.0
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (w**2).sum())


def main() -> None:
    """Serve until the input ends."""
    # The library prints: what it says must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = Peer()
    do = {
        "load": peer.load,
        "encode": peer.encode,
        "constrain": peer.constrain,
        "answer": peer.answer,
        "peak": lambda: {"bytes": peak_bytes()},
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = do[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
