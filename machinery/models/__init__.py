"""Models: what their folders hold, what they become, and what their forwards take.

model_folders      configs, weights and tokenizers, from the hub or a folder, and what is refused
forwards           what a model's forward takes beside ids and a mask
lora               --lora_dim
saving             a folder that stock transformers loads
model_card         its README.md
scoring_tokenizer  a reward model's tokenizer, which appends EOS
"""
