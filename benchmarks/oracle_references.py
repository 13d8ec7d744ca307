"""Writes the reference outputs that the engine is tested against: transformers, float32, greedy, one prompt at a time.

`python -m pagetier.benchmarks.oracle_references --model smollm2 --text tests/engine/data/oracle_text.txt
--output tests/engine/data/smollm2_fp32_greedy.json` takes some two minutes on two cores. EOS is ignored. The file holds
token ids throughout, so that a test of the model needs no tokenizer, and the margin between the two best logits of
every step: where it is small, another order of float32 additions may rightly choose the other token.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from pagetier.engine.pull import resolve_model
from pagetier.engine.weights.export_hf import export_hf

NUM_NEW_TOKENS = 64
# Slices of the text: lengths in tokens, dense around 1, the block size of 16, and two and four prefill tiles.
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 100, 129, 200, 255, 257, 400, 512, 700, 1024, 1500)
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits and a colour for each.",
    "What is 17 + 26? Explain step by step.",
    "Summarise the story of the two brothers and the cat in one sentence.",
    "Write a Python function that reverses a string.",
    "Who was Marie Curie?",
    "Translate 'Good morning, how are you?' into Spanish.",
)


def prompts(tokenizer: Any, text: str) -> list[dict[str, Any]]:
    """{"start", "length"} of slices of the text's ids, spread over it, and {"ids"} of the chat prompts."""
    num_ids = len(text_ids(tokenizer, text))
    slices = [
        {"start": (index * 389) % (num_ids - length + 1), "length": length} for index, length in enumerate(LENGTHS)
    ]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return [*slices, *({"ids": list(ids)} for ids in chats)]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@torch.inference_mode()
def greedy(model: Any, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """NUM_NEW_TOKENS ids and, for each, the best logit minus the second best."""
    inputs, cache = torch.tensor([prompt_ids]), None  # (1, num_tokens)
    output: list[int] = []
    margins: list[float] = []
    for _ in range(NUM_NEW_TOKENS):
        out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        best = out.logits[0, -1].float().topk(2)  # (2,)
        output.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        inputs = best.indices[:1][None]  # (1, 1)
    return output, margins


def references(model_name: str, text: str, command: str) -> dict[str, Any]:
    """The file's content."""
    with tempfile.TemporaryDirectory() as folder:
        export_hf(resolve_model(model_name), Path(folder) / "model", "float32")
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(Path(folder) / "model")
    model.train(False)
    ids = text_ids(tokenizer, text)
    cases = []
    for prompt in prompts(tokenizer, text):
        prompt_ids = prompt["ids"] if "ids" in prompt else ids[prompt["start"] : prompt["start"] + prompt["length"]]
        output, margins = greedy(model, prompt_ids)
        cases.append({"prompt": prompt, "output_ids": output, "margins": margins})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    return {"command": command, "model": model_name, "versions": versions, "text_ids": ids, "cases": cases}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that the prompts are slices of")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(argv)
    command = (
        f"python -m pagetier.benchmarks.oracle_references --model {options.model} --text {options.text} "
        f"--output {options.output}"
    )
    content = references(options.model, options.text.read_text(encoding="utf-8"), command)
    lines = [json.dumps(case, separators=(",", ":")) for case in content.pop("cases")]
    head = json.dumps(content, separators=(",", ":"))
    options.output.write_text(f'{head[:-1]},"cases":[\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    sys.stderr.write(f"{options.output}: {len(lines)} cases\n")


if __name__ == "__main__":
    main()
