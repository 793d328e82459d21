"""Models: what their folders hold, what they become, and what their forwards take.

model_folders      configs, weights and tokenizers, from the hub or a folder, and what is refused;
                   what a model's forward takes beside ids and a mask (by the name forwards, too)
lora               --lora_dim
saving             a folder that stock transformers loads
"""
