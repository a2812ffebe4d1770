"""An adapter as a training run leaves it, made with PEFT, and the answer that transformers gives with it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch

PROMPT, TOKENS = "hello there", 12


def save_adapter(model_dir: Path, checkpoint: Path) -> Path:
    """A checkpoint's folder with a LoRA adapter of random weights, and the files that trainers write beside it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    adapted = get_peft_model(_base(model_dir), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(str(checkpoint))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 900}))
    torch.save({"step": 900}, checkpoint / "optimizer.pt")
    torch.save({"lr": 1e-4}, checkpoint / "training_args.bin")
    return checkpoint


def expected_answer(model_dir: Path, checkpoint: Path) -> str:
    """The greedy continuation of PROMPT by transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    model = PeftModel.from_pretrained(_base(model_dir), str(checkpoint)).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(**ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


def _base(model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype="auto")
    return model
