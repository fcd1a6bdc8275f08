"""What exists right now, and for how long: runtimes, sandboxes, conversations, runs.

One program's own, gone with it:

    settings.py      what an operator may choose
    runtime.py       Runtime: one broker, one data directory, the sandboxes of one process
    sandbox.py       AsyncSandbox: what a caller owns; sequences, and does not know how
    means.py         what all of them share; home.py: one made ahead, for whoever comes next
    conversation.py  one workspace, and the kernels over it
    contexts.py      those kernels by name: `default`, and others beside it
    context.py       one of them, at most one live; its runs in their order
    request.py       what a call may ask for, checked before anything is started
    live.py          a run while it goes on: its events so far, and its result at the end
    stop.py          the ladder: interrupt, then kill
    questions.py     `input()` inside, answered by a function of the caller's
    stdin.py         the standard input of a command that was left open
    commands.py      background commands; command_log.py: what they print, on its way to the disk
    usage.py         what a live sandbox uses
    verdict.py       how a run ended, decided from what was seen
    quota.py         a disk quota, where the host gives one; disk.py: what stands in for it
    egress/          the proxy that a networked sandbox speaks to; outlet.py: its place beside one;
                     decisions.py: what it decided, told within bounds
    attacks/         the built-in attacks of `sbx doctor --attack`
    files.py         the files of a conversation, in worker threads
    attachments.py   directories of the host, attached to a sandbox that lives; grounds.py: from
                     where a service does so
    tripwires.py     fake credentials, whose use freezes a sandbox
    data.py          where a runtime's workspaces lie, held by a lock
    blocking.py      the one runtime of a process, that every synchronous Sandbox in it shares
    store/           what the service remembers: one SQLite file, one writer
    access.py        who calls, and what they may: keys, tokens, peers
    ids.py           what a caller may use as an id
    secret_files.py  files that hold a secret
    replies.py       a call with an idempotency key is done once
    interpreter.py   which Python a policy's kernels run, and what it needs to be shown
    environments/    Pythons with packages, made for policies to name

A service's, which outlive its process:

    house.py         House: everything that one service holds, over one data directory
    sandboxes.py     made, found for whoever calls, used, kept, ended
    registry.py, using.py, views.py: which there are; around any use; what is told of them
    lifecycle.py     the states, and every way from one to another, in one table
    living.py        one sandbox: its row, and what lives of it
    kept.py          AsyncSandbox whose files outlive it
    cargos.py        workspaces; uids.py: whom their files belong to on the host
    kernel_limits.py how many kernels live at once, and who makes room
    open_limit.py    how many conversations hold their files open
    reaper.py        what happens by itself: idle time-outs, expiry, collection, short memory
    leftovers.py     files that were deleted, and those that the store does not know
    recovery.py      what is mended after a kill
    runs.py          queued, recorded, followed from afar
    sessions.py      the rules of sessions; ids.py
    access.py        who calls, and what they may; secret_files.py
    replies.py       idempotency
    store/           what is remembered
    maintenance/     check, back up, restore and repair the store, for `sbx store`

May import: everything below it (kernels, isolation, workspace, policy, protocol, errors).
"""
