// Shows the server's description of its API in Swagger UI, with the key that the page at / keeps for this tab.

/* global SwaggerUIBundle */
const KEY = "facet-key", byId = (id) => document.getElementById(id);

function authorized(request) {
  const key = sessionStorage.getItem(KEY);
  if (key) request.headers.Authorization = `Bearer ${key}`;
  return request;
}

// Texts as React elements: Swagger UI's own component writes HTML, which the page's policy does not allow.
const plainTexts = ({ React: { createElement } }) => ({
  wrapComponents: {
    Markdown: () => ({ source }) => {
      const words = (text) => text.split(/`([^`]+)`/).map((part, at) => (at % 2 ? createElement("code", { key: at }, part) : part));
      const paragraphs = (source ?? "").trim().split(/\n\n+/);
      return createElement("div", { className: "markdown" }, paragraphs.map((text, at) => createElement("p", { key: at }, words(text))));
    },
  },
});

// Paths of version 1 first: others are mostly the same for clients that leave the version out.
const byVersion = (one, other) => !one.get("path").startsWith("/v1/") - !other.get("path").startsWith("/v1/");

async function start() {
  const response = await fetch("openapi.json", authorized({ headers: {}, cache: "no-store" }));
  byId("ask").hidden = response.ok;
  if (!response.ok) {
    byId("reason").textContent = (await response.json()).error.message;
    return;
  }
  SwaggerUIBundle({
    spec: await response.json(),
    domNode: byId("api"),
    deepLinking: true,
    displayRequestDuration: true,
    defaultModelsExpandDepth: -1,
    operationsSorter: byVersion,
    plugins: [plainTexts],
    requestInterceptor: authorized,
    tryItOutEnabled: true,
    validatorUrl: null,
  });
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  start();
});
document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches);
start();
