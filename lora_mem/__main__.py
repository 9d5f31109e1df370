"""`python -m lora_mem` is the `lora-mem` command."""

from lora_mem.cli import main

if __name__ == "__main__":
    main()
