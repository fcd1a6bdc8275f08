// The address of the page, which each page of the console has.
import { signal } from "@preact/signals";

export const path = signal(location.pathname);

export function go(to: string, replace = false): void {
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  path.value = location.pathname;
}

addEventListener("popstate", () => {
  path.value = location.pathname;
});

/** Links of the page change the address without a request. */
addEventListener("click", (event) => {
  const link = (event.target as Element).closest?.("a");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (link.origin !== location.origin || link.target || link.hasAttribute("download")) return;
  if (!link.pathname.startsWith("/console/") || link.hash) return;
  event.preventDefault();
  go(link.pathname);
});

/** `/console/sandboxes/x` is ["sandboxes", "x"]. */
export function segments(): string[] {
  return path.value
    .replace(/^\/console\/?/, "")
    .split("/")
    .filter(Boolean)
    .map(decodeURIComponent);
}
