// The page of a browser that is not logged in.
import type { JSX } from "preact";
import { t } from "../i18n";
import { Failure } from "../parts/common";
import { loginFailed, startFailure } from "../shell/state";

export function LoginPage(): JSX.Element {
  return (
    <main class="login" id="main">
      <h1>{t("login.title")}</h1>
      {loginFailed.value && (
        <p class="failure" role="alert">
          {t("login.failed")}
        </p>
      )}
      {startFailure.value && <Failure error={startFailure.value} retry={() => location.reload()} />}
      <p>{t("login.purpose")}</p>
      <pre class="output" tabIndex={0}>
        sbx console
      </pre>
      <p class="hint">{t("login.hint")}</p>
    </main>
  );
}
