// E2B's JavaScript packages against a service. test_e2b_javascript.py runs it, and has the names.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { after, before, test } from 'node:test'

const require = createRequire(`${process.env.E2B_MODULES}/`)
const { Sandbox } = require('@e2b/code-interpreter')
const { CommandExitError, FileNotFoundError, NotFoundError, SandboxNotFoundError, TimeoutError } = require('e2b')

const options = {
  apiKey: process.env.E2B_API_KEY,
  apiUrl: process.env.E2B_API_URL,
  sandboxUrl: process.env.E2B_SANDBOX_URL,
}
const text = new TextDecoder()
let box

async function until(condition) {
  const end = Date.now() + 30_000
  while (!(await condition())) {
    assert.ok(Date.now() < end, 'the condition did not come true')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

before(async () => {
  box = await Sandbox.create({ ...options, metadata: { kind: 'js ü' }, envs: { FROM_CREATE: '1' } })
})
after(async () => {
  await box.kill()
})

test('info and list', async () => {
  const info = await box.getInfo()
  assert.equal(info.sandboxId, box.sandboxId)
  assert.equal(info.state, 'running')
  const page = await Sandbox.list({ ...options, query: { metadata: { kind: 'js ü' } } }).nextItems()
  assert.deepEqual(page.map((each) => each.sandboxId), [box.sandboxId])
})

test('the time-out', async () => {
  await box.setTimeout(600_000)
  const left = (await box.getInfo()).endAt - Date.now()
  assert.ok(left > 590_000 && left <= 600_000)
})

test('connect, pause and kill', async () => {
  const other = await Sandbox.create(options)
  await other.files.write('kept', '1')
  assert.equal(await other.pause(), true)
  assert.equal(await other.isRunning(), false)
  const again = await Sandbox.connect(other.sandboxId, options)
  assert.equal(await again.files.read('kept'), '1')
  assert.equal(await again.kill(), true)
  assert.equal(await other.isRunning(), false)
  assert.equal(await again.kill(), false)
  await assert.rejects(other.commands.run('true'), SandboxNotFoundError)
})

test('metrics', async () => {
  const [metrics] = await box.getMetrics()
  assert.ok(metrics.memTotal > 0)
})

test('a command with streams', async () => {
  const out = []
  const result = await box.commands.run('pwd; echo $FROM_CREATE $OWN; echo e >&2', {
    envs: { OWN: 'ü' },
    onStdout: (data) => out.push(data),
  })
  assert.equal(result.stdout, '/home/user\n1 ü\n')
  assert.equal(result.stderr, 'e\n')
  assert.equal(out.join(''), result.stdout)
})

test('a command that fails', async () => {
  await assert.rejects(box.commands.run('exit 3'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.equal(error.exitCode, 3)
    return true
  })
})

test('a command that takes too long', async () => {
  await assert.rejects(box.commands.run('sleep 1000', { timeoutMs: 1000 }), TimeoutError)
})

test('a command in the background', async () => {
  const handle = await box.commands.run('sleep 1000', { background: true })
  assert.ok((await box.commands.list()).some((each) => each.pid === handle.pid))
  assert.equal(await handle.kill(), true)
  await assert.rejects(handle.wait(), CommandExitError)
  assert.equal(await box.commands.kill(handle.pid), false)
})

test('standard input', async () => {
  const handle = await box.commands.run('cat', { background: true, stdin: true })
  await box.commands.sendStdin(handle.pid, 'one\n')
  await box.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'one\n')
})

test('connect to a command', async () => {
  const handle = await box.commands.run('read line; echo got $line', { background: true, stdin: true })
  const again = await box.commands.connect(handle.pid)
  await box.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await again.wait()).stdout, 'got it\n')
})

test('a terminal', async () => {
  const shown = []
  const terminal = await box.pty.create({ cols: 100, rows: 30, onData: (data) => shown.push(text.decode(data)) })
  await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await terminal.wait()
  assert.match(shown.join(''), /30 100/)
})

test('files', async () => {
  const info = await box.files.write('dir/a.txt', 'ü')
  assert.equal(info.path, '/home/user/dir/a.txt')
  assert.equal(await box.files.read('dir/a.txt'), 'ü')
  assert.deepEqual([...(await box.files.read('/home/user/dir/a.txt', { format: 'bytes' }))], [0xc3, 0xbc])
  assert.equal(await box.files.exists('none'), false)
  await assert.rejects(box.files.read('none'), FileNotFoundError)
})

test('several files', async () => {
  await box.files.write([{ path: 'm/1', data: '1' }, { path: '/tmp/m/2', data: '2' }])
  assert.equal((await box.files.read('m/1')) + (await box.files.read('/tmp/m/2')), '12')
})

test('the tree', async () => {
  assert.equal(await box.files.makeDir('t/u'), true)
  assert.equal(await box.files.makeDir('t/u'), false)
  await box.files.write('t/f', '1')
  await box.files.rename('t/f', 't/g')
  const names = (await box.files.list('t')).map((each) => `${each.name} ${each.type}`)
  assert.deepEqual(names, ['g file', 'u dir'])
  assert.equal((await box.files.getInfo('t/g')).size, 1)
  await box.files.remove('t')
  assert.equal(await box.files.exists('t'), false)
})

test('a watch', async () => {
  await box.files.makeDir('watched')
  const events = []
  const handle = await box.files.watchDir('watched', (event) => events.push(event))
  await box.files.write('watched/new', '1')
  await until(() => events.some((each) => each.name === 'new' && each.type === 'create'))
  await handle.stop()
})

test('signed addresses', async () => {
  await box.files.write('signed', 'content')
  const reply = await fetch(await box.downloadUrl('signed'))
  assert.equal(await reply.text(), 'content')
  const form = new FormData()
  form.append('file', new Blob(['up']), 'ignored')
  const sent = await fetch(await box.uploadUrl('uploaded'), { method: 'POST', body: form })
  assert.equal(sent.status, 200)
  assert.equal(await box.files.read('uploaded'), 'up')
})

test('code with results', async () => {
  const out = []
  const run = await box.runCode('x = 41\nprint("a\\u2028ü")\nx + 1', { onStdout: (each) => out.push(each.line) })
  assert.equal(run.text, '42')
  assert.equal(out.join(''), 'a\u2028ü\n')
  assert.equal((await box.runCode('x')).text, '41')
})

test('code that fails', async () => {
  const run = await box.runCode('1/0')
  assert.equal(run.error.name, 'ZeroDivisionError')
})

test('contexts', async () => {
  const context = await box.createCodeContext({ cwd: '/tmp' })
  const run = await box.runCode('import os\nos.getcwd()', { context })
  assert.equal(run.text, '/tmp')
  assert.ok((await box.listCodeContexts()).some((each) => each.id === context.id))
  await box.restartCodeContext(context)
  await box.removeCodeContext(context)
  await assert.rejects(box.runCode('1', { context }), NotFoundError)
})

test('code that takes too long', async () => {
  await box.runCode('kept = 7')
  await assert.rejects(box.runCode('import time\nwhile True: time.sleep(0.05)', { timeoutMs: 1000 }), TimeoutError)
  assert.equal((await box.runCode('kept')).text, '7')
})

test('a wrong key', async () => {
  await assert.rejects(Sandbox.create({ ...options, apiKey: `e2b_${'0'.repeat(64)}` }), /unknown|valid|nauthorized/)
})
