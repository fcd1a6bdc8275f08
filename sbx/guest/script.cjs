// Runs a script as if it lay in the working directory: node script.cjs LANGUAGE FILE ARGUMENT…
//
// FILE lies below /tmp, where neither the files beside which the script runs nor its node_modules
// would be found. So it is given to Node.js under a name in the working directory that no file has:
//
//   1. TypeScript is made JavaScript: by `typescript` or `esbuild` of node_modules, else by
//      Node.js itself, where it can.
//   2. What Node.js can read as CommonJS is that; what fails for `import`, `export` or a top-level
//      `await` is an ES module.

'use strict';

const fs = require('node:fs');
const Module = require('node:module');
const path = require('node:path');
const vm = require('node:vm');
const { pathToFileURL } = require('node:url');

const [language, file, ...given] = process.argv.slice(2);
const main = path.join(process.cwd(), '(script).js');
process.argv = [process.argv[0], main, ...given];

const ES_MODULE = [
  'Cannot use import statement outside a module',
  "Unexpected token 'export'",
  "Cannot use 'import.meta' outside a module",
  'await is only valid in async functions and the top level bodies of modules',
];

function findPackage(name) {
  try {
    return Module.createRequire(main)(name);
  } catch (error) {
    if (error.code === 'MODULE_NOT_FOUND') return null;
    throw error;
  }
}

function toJavaScript(code) {
  const typescript = findPackage('typescript');
  if (typescript) {
    const { ModuleKind, ScriptTarget } = typescript;
    const compilerOptions = { module: ModuleKind.ESNext, target: ScriptTarget.ES2022 };
    return typescript.transpileModule(code, { compilerOptions, fileName: 'script.ts' }).outputText;
  }
  const esbuild = findPackage('esbuild');
  if (esbuild) return esbuild.transformSync(code, { loader: 'ts', format: 'esm' }).code;
  if (Module.stripTypeScriptTypes) return silently(stripped, code);
  throw new Error('no compiler for TypeScript: put the package typescript into node_modules');
}

function stripped(code) {
  return Module.stripTypeScriptTypes(code, { mode: 'transform' });
}

// The warning that this is experimental is for whoever chose it, and that was not the script.
function silently(act, ...words) {
  const warn = process.emitWarning;
  process.emitWarning = () => {};
  try {
    return act(...words);
  } finally {
    process.emitWarning = warn;
  }
}

function isModule(code) {
  try {
    vm.compileFunction(code, ['exports', 'require', 'module', '__filename', '__dirname']);
  } catch (error) {
    return error instanceof SyntaxError && ES_MODULE.includes(error.message);
  }
  return false;
}

function runCommonJs(code) {
  const module = new Module(main, null);
  module.filename = main;
  module.paths = Module._nodeModulePaths(path.dirname(main));
  process.mainModule = module; // what `require.main === module` asks for
  module._compile(code, main);
  module.loaded = true;
}

// The hooks run in a thread of their own, so they are handed the code as text.
function hooks(url, source) {
  return `
    const MAIN = ${JSON.stringify(url)};
    const source = ${JSON.stringify(source)};
    export async function resolve(specifier, context, next) {
      if (specifier === MAIN) return { url: MAIN, format: 'module', shortCircuit: true };
      return next(specifier, context);
    }
    export async function load(url, context, next) {
      if (url === MAIN) return { format: 'module', source, shortCircuit: true };
      return next(url, context);
    }`;
}

function runModule(code) {
  const url = pathToFileURL(main).href;
  let ended = false;
  process.on('beforeExit', () => {
    if (!ended && !process.exitCode) process.exitCode = 13; // as of any module that waits forever
  });
  if (Module.registerHooks) {
    Module.registerHooks({
      resolve: (specifier, context, next) =>
        specifier === url
          ? { url, format: 'module', shortCircuit: true }
          : next(specifier, context),
      load: (loaded, context, next) =>
        loaded === url
          ? { format: 'module', source: code, shortCircuit: true }
          : next(loaded, context),
    });
  } else {
    Module.register(`data:text/javascript,${encodeURIComponent(hooks(url, code))}`);
  }
  // Not awaited: a failure is the unhandled one that it would be in a script of its own.
  import(url).then(() => {
    ended = true;
  });
}

// A pipe that is full would else be written to when the script lets the loop turn: one that does
// not would fill its memory, and `process.exit` would throw away what was printed before it.
for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);

const text = fs.readFileSync(file, 'utf8');
const code = language === 'typescript' ? toJavaScript(text) : text;
if (isModule(code)) runModule(code);
else runCommonJs(code);
