"""transformers: `generate` on one batch padded on the left; all rows run until the longest has its tokens."""

from __future__ import annotations

from typing import Any


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._torch = torch
        self.version = f"transformers {transformers.__version__}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        )
        self._model.generation_config.eos_token_id = None  # as ignore_eos

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        torch = self._torch
        prompts = [request["prompt_ids"] for request in requests]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        num_new = max(request["num_new"] for request in requests)
        with torch.inference_mode():
            tokens = self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0
            )
        rows = tokens[:, longest:].tolist()
        return [row[: request["num_new"]] for row, request in zip(rows, requests, strict=True)]


def open_engine(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
