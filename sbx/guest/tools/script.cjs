// Runs a script as if it lay in the working directory: node script.cjs LANGUAGE FILE ARGUMENT…
//
// FILE lies below /tmp, where Node.js would find neither the files of the working directory nor its
// node_modules. So Node.js gets the script under an unused name in the working directory:
//
//   1. TypeScript is compiled to JavaScript: by `typescript` or `esbuild` of node_modules, else by
//      Node.js itself, if it supports that.
//   2. Code that Node.js can read as CommonJS is CommonJS. Code that fails because of `import`,
//      `export` or a top-level `await` is an ES module.

'use strict';

const fs = require('node:fs');
const Module = require('node:module');
const path = require('node:path');
const vm = require('node:vm');
const { pathToFileURL } = require('node:url');

const [language, file, ...scriptArguments] = process.argv.slice(2);
const main = path.join(process.cwd(), '(script).js');
process.argv = [process.argv[0], main, ...scriptArguments];

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

// Suppress the warning that this feature is experimental: the script did not choose it.
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
  process.mainModule = module; // for `require.main === module`
  module._compile(code, main);
  module.loaded = true;
}

// The hooks run in another thread, so they get the code as text.
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
    if (!ended && !process.exitCode) process.exitCode = 13; // as Node.js does for an endless `await`
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
  // Not awaited: a failure must be an unhandled rejection, as in any other script.
  import(url).then(() => {
    ended = true;
  });
}

// Make writes block. Otherwise Node.js writes to a full pipe only when the script returns to the
// event loop. A script that does not return would fill its memory, and `process.exit` would discard
// its output.
for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);

const text = fs.readFileSync(file, 'utf8');
const code = language === 'typescript' ? toJavaScript(text) : text;
if (isModule(code)) runModule(code);
else runCommonJs(code);
