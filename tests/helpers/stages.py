"""What `status()` says of one adapter."""

from __future__ import annotations


def one(hook, lora_int_id=1):
    return next(found for found in hook.status().adapters if found.lora_int_id == lora_int_id)
