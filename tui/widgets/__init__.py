"""The widgets of the chat; each shows one thing and asks the app for nothing but colours."""
