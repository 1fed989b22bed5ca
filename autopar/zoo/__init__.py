"""The zoo: tiny architectures of the transformers library, each planned, run on virtual ranks and verified."""
