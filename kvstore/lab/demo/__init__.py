"""The demo of `kvstore demo`.

Lives here: the run (`chats`), what it prints (`report`), the REST interface that `--stay` keeps running
(`local_admin`). May be imported from here: everything, by `cli` and tests.
"""
