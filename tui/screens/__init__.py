"""The screens of the chat, imported when they are first opened."""
