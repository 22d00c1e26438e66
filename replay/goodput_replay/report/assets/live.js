// Updates the page of a run from the events of its server, until the finished report replaces it.
"use strict";

(() => {
  const connection = document.getElementById("connection");
  const events = new EventSource("events");

  events.addEventListener("open", () => {
    connection.textContent = "live";
    connection.classList.remove("FAIL");
  });
  // The parts are rendered by the server with the templates of the report, which escape all texts.
  events.addEventListener("update", (event) => {
    const { title, parts, data } = JSON.parse(event.data);
    document.title = title;
    for (const [id, html] of Object.entries(parts)) {
      const element = document.getElementById(id);
      if (element) element.outerHTML = html;
    }
    goodputPage.show(data);
  });
  events.addEventListener("finished", () => {
    events.close();
    connection.textContent = "finished";
    location.replace("report");
  });
  events.addEventListener("error", () => {
    connection.textContent = "connection lost";
    connection.classList.add("FAIL");
  });
})();
