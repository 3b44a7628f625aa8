"""Instruction data: conversations rendered by a chat template, with loss on the assistant's turns only."""
