"""The half of the pipeline that has Django: options, commands, what is written back."""
