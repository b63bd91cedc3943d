"""One process of `gpu.py`: a peer's updates on one card, as its own documentation sets it up. Reads jobs on stdin.

    python benchmarks/gpu_peers.py PEER CHECKPOINT < jobs.json

unsloth        FastLanguageModel with `use_gradient_checkpointing="unsloth"`, bf16 autocast
trl+liger      transformers + PEFT with Liger's Qwen3 kernels and fused cross-entropy, TRL's activation offloading
transformers   transformers + PEFT, SDPA, non-reentrant checkpointing

Batch 1, LoRA of rank 16 on the seven linears, AdamW. A job is {"name", "work": {"sft": T} | {"branch": [P, R]},
"warmups", "repeats"}. `branch` is one side of a preference pair with logits of the reply only; a pair is two of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

PEER = sys.argv[1]
if PEER == "unsloth":
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    import unsloth  # noqa: F401 - it patches what is imported after it

import torch  # noqa: E402

GIB = 2**30
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = {"unsloth": "unsloth", "trl+liger": "liger-kernel", "transformers": "transformers"}


def load(folder: str, longest: int) -> torch.nn.Module:
    """Return the peer's model with its adapter, ready to train."""
    if PEER == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=longest, load_in_4bit=True, dtype=torch.bfloat16
        )
        model = FastLanguageModel.get_peft_model(
            model, r=16, lora_alpha=16, lora_dropout=0, target_modules=LINEARS,
            use_gradient_checkpointing="unsloth", random_state=0,
        )  # fmt: skip
        FastLanguageModel.for_training(model)
        return model
    if PEER == "trl+liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=True)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": 0}, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    settings = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).train()


def update_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: dict[str, Any]) -> Callable[[], float]:
    """Return a function that makes one update and returns its loss."""
    vocabulary = model.config.vocab_size
    around: Any = contextlib.nullcontext()
    if PEER == "trl+liger":
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        around = get_act_offloading_ctx_manager(model, use_pin_memory=True)

    def sft() -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (1, work["sft"]), device="cuda")
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def branch() -> torch.Tensor:
        prompt, reply = work["branch"]
        ids = torch.randint(0, vocabulary, (1, prompt + reply), device="cuda")
        logits = model(input_ids=ids, logits_to_keep=reply + 1, use_cache=False).logits[:, :-1].float()
        logp = torch.log_softmax(logits, -1).gather(-1, ids[:, -reply:, None]).mean()
        return -torch.nn.functional.logsigmoid(2.0 * (logp - logp.detach()) - 0.5)

    def update() -> float:
        narrow = torch.autocast("cuda", dtype=torch.bfloat16) if PEER == "unsloth" else contextlib.nullcontext()
        with around:
            with narrow:
                loss = sft() if "sft" in work else branch()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return update


def main() -> None:
    """Measure every job of stdin in one process."""
    jobs = json.load(sys.stdin)
    lengths = [job["work"].get("sft") or sum(job["work"]["branch"]) for job in jobs]
    started = time.perf_counter()
    model = load(sys.argv[2], max(lengths))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    print(f"{PEER} loaded in {time.perf_counter() - started:.1f} s", flush=True)
    for job, tokens in zip(jobs, lengths, strict=True):
        found: dict[str, Any] = {**job, "who": PEER, "version": version(PACKAGES[PEER]), "tokens": tokens}
        torch.cuda.empty_cache()
        try:
            update = update_of(model, optimizer, job["work"])
            for _ in range(job.get("warmups", 1)):
                update()
            torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(job.get("repeats", 2)):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                loss = update()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
            found |= {
                "s": statistics.median(seconds),
                "all_s": seconds,
                "tok_per_s": tokens / statistics.median(seconds),
                "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
                "loss": loss,
            }
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = str(error).splitlines()[0]
            optimizer.zero_grad(set_to_none=True)
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
