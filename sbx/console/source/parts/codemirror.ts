// The editor of cells, loaded at its first use.
import { autocompletion, closeBrackets, closeBracketsKeymap, completionKeymap, startCompletion, type CompletionContext, type CompletionResult } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { EditorState, Prec } from "@codemirror/state";
import { drawSelection, EditorView, keymap } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

export interface Editor {
  focus: () => void;
  end: () => void;
}

interface Options {
  text: string;
  label: string;
  onChange: (text: string) => void;
  onRun: () => void;
  /** The names that fit at a place; places count UTF-16 units. */
  complete: (text: string, place: number) => Promise<{ matches: string[]; start: number; end: number }>;
}

const nonce = document.querySelector<HTMLMetaElement>("meta[name=sbx-nonce]")?.content ?? "";

const theme = EditorView.theme({
  "&": { background: "var(--code)", border: "1px solid var(--line)", borderRadius: ".4rem", maxHeight: "30rem" },
  "&.cm-focused": { outline: "3px solid var(--accent)", outlineOffset: "1px" },
  ".cm-scroller": { fontFamily: 'ui-monospace, "DejaVu Sans Mono", monospace', fontSize: ".9em", overflow: "auto" },
  ".cm-content": { caretColor: "var(--text)", padding: ".5rem 0" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-selectionBackground, &.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground": { background: "var(--chosen)" },
  ".cm-tooltip": { background: "var(--raised)", color: "var(--text)", border: "1px solid var(--line)" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { background: "var(--accent)", color: "var(--on-accent)" },
});

export function edit(parent: HTMLElement, options: Options): Editor {
  const complete = async (context: CompletionContext): Promise<CompletionResult | null> => {
    if (!context.explicit) return null; // each key would ask the kernel
    try {
      const found = await options.complete(context.state.doc.toString(), context.pos);
      return { from: found.start, to: found.end, options: found.matches.map((label) => ({ label })) };
    } catch {
      return null; // the kernel is busy or missing
    }
  };
  const run = (): boolean => (options.onRun(), true);
  const leave = (view: EditorView): boolean => (view.contentDOM.blur(), true);
  const view = new EditorView({
    parent,
    doc: options.text,
    extensions: [
      EditorView.cspNonce.of(nonce),
      Prec.highest(keymap.of([{ key: "Shift-Enter", run }])),
      autocompletion({ override: [complete], activateOnTyping: false, interactionDelay: 0 }),
      keymap.of([...completionKeymap, { key: "Ctrl-Space", run: startCompletion }, { key: "Escape", run: leave }]),
      keymap.of([...closeBracketsKeymap, indentWithTab, ...historyKeymap, ...defaultKeymap]),
      history(),
      closeBrackets(),
      bracketMatching(),
      indentOnInput(),
      indentUnit.of("    "),
      EditorState.tabSize.of(4),
      python(),
      syntaxHighlighting(classHighlighter),
      drawSelection(),
      EditorView.lineWrapping,
      EditorView.contentAttributes.of({ "aria-label": options.label }),
      EditorView.updateListener.of((update) => update.docChanged && options.onChange(update.state.doc.toString())),
      theme,
    ],
  });
  return {
    focus: () => view.focus(),
    end: () => view.destroy(),
  };
}
