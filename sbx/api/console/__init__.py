"""The console in a browser: its listeners, its logins and its page.

    listener.py     which connections come from browsers, and what they may do
    login.py        one-time codes, the login and its end, the logins of an owner
    me.py           the caller, its rights and the service
    observe.py      the network of a sandbox, one run, completion, policies, directories
    settings.py     the settings of the console
    conversations.py   the list of conversations, their titles, their end
    templates.py    templates of prompts
    quarantine.py   the files that wait for the consent of the owner of a project
    pages.py        the page and its files
    stream.py       one WebSocket for all that changes
    topics.py       what a client of it can follow

Programs use the other routes, and request codes for a person. The page uses public routes only.
"""
