# Trains the quickstart while it is built, and serves it:
#   docker build -t txl .
#   docker run --rm -p 127.0.0.1:8080:8080 -e TXL_API_KEY=sixteen-characters-or-more txl
# Then open http://localhost:8080, or see docs/server.md.

FROM python:3.13-slim-trixie AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-trixie
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[plots,serve]"
RUN useradd --create-home --uid 1000 txl
USER 1000
WORKDIR /home/txl
ARG MINUTES=3
RUN txl train quickstart --quiet --out runs/quickstart --set "train.max_minutes=$MINUTES"
ENV PORT=8080
EXPOSE 8080
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://localhost:' + os.environ['PORT'] + '/healthz')"]
# The key comes with `docker run` and is in no layer. The server takes keys only from a file that nobody else can read.
CMD ["sh", "-c", "umask 077 && echo \"${TXL_API_KEY:?is missing: docker run -e TXL_API_KEY=...}\" > keys && exec txl serve runs/quickstart --host 0.0.0.0 --port $PORT --api-key-file keys"]
