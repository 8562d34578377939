// Keeps the planner's page and what it runs on, so that it opens without a network once it was open.
const NAME = "fsdplab-planner-{{ version }}", KEPT = {{ kept|safe }};
self.addEventListener("install", event => event.waitUntil(
  caches.open(NAME).then(cache => cache.addAll(KEPT)).then(() => self.skipWaiting())));
self.addEventListener("activate", event => event.waitUntil(
  caches.keys().then(names => Promise.all(names.filter(name => name.startsWith("fsdplab-planner-") && name !== NAME).map(name => caches.delete(name))))
    .then(() => self.clients.claim())));
self.addEventListener("fetch", event => event.respondWith(
  caches.match(event.request).then(kept => kept || fetch(event.request))));
