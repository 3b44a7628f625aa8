"""To and from other formats: Hugging Face's Llama files, trees of seed layers."""
