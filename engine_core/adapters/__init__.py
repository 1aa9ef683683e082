"""What servers and engines tell each other of adapters (LoRA), and the files of these."""
