// The terminal, loaded at its first use. Its text is in the DOM for screen readers.
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";

// xterm makes its own <style>: the policy of the page allows only those with the nonce.
const nonce = document.querySelector<HTMLMetaElement>("meta[name=sbx-nonce]")?.content ?? "";
const create = document.createElement.bind(document);
document.createElement = ((name: string, options?: ElementCreationOptions) => {
  const made = create(name, options);
  if (name === "style") made.setAttribute("nonce", nonce);
  return made;
}) as typeof document.createElement;

/** Attach to a terminal of a sandbox until the returned function is called. */
export function attach(element: HTMLElement, url: string, onEnd: (reason: string) => void): () => void {
  const terminal = new Terminal({ screenReaderMode: true, allowProposedApi: false, convertEol: false, scrollback: 5000, fontSize: 14 });
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  terminal.open(element);
  fit.fit();
  const socket = new WebSocket(`${url}?rows=${terminal.rows}&columns=${terminal.cols}`);
  socket.binaryType = "arraybuffer";
  socket.onmessage = (message) => {
    if (typeof message.data !== "string") {
      terminal.write(new Uint8Array(message.data as ArrayBuffer));
      return;
    }
    const report = JSON.parse(message.data) as { type?: string; reason?: string; exit_code?: number };
    if (report.type === "ended") onEnd(report.reason ?? String(report.exit_code ?? ""));
  };
  socket.onclose = () => onEnd("");
  const encoder = new TextEncoder();
  terminal.onData((text) => socket.readyState === WebSocket.OPEN && socket.send(encoder.encode(text)));
  const resized = new ResizeObserver(() => {
    fit.fit();
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: "resize", rows: terminal.rows, columns: terminal.cols }));
  });
  resized.observe(element);
  terminal.focus();
  return () => {
    resized.disconnect();
    socket.close();
    terminal.dispose();
  };
}
