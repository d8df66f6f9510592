# Targets operator, sidecar and engine. BASE is any image with Python 3.11 or newer as python3. What it brings is not
# installed a second time: Debian's python3-torch, a small CPU build, makes a small engine image.
ARG BASE=python:3.13-slim

FROM ${BASE} AS python
# The user has a name because libraries ask for it.
RUN echo "kvsteward:x:65532:65532::/tmp:/usr/sbin/nologin" >> /etc/passwd && echo "kvsteward:x:65532:" >> /etc/group && \
    python3 -m venv --system-site-packages /opt/kvsteward
ENV PATH=/opt/kvsteward/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt /tmp/constraints.txt
# A base with its own torch settles the versions of torch and of what belongs to it.
RUN if python3 -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"; then \
        sed -i -E '/^(torch|triton|nvidia-|cuda-|numpy|sympy|networkx|mpmath)/d' /tmp/constraints.txt; \
    fi

# The distribution without any package in it: what an image has to have installed, whatever the source says.
FROM python AS requirements
RUN pip install hatchling
WORKDIR /source
COPY pyproject.toml ./
RUN touch README.md && pip wheel --no-deps --no-build-isolation --wheel-dir /requirements .

FROM requirements AS operator-source
COPY contract contract
COPY operator operator
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM requirements AS sidecar-source
COPY contract contract
COPY sidecar sidecar
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM requirements AS engine-source
COPY contract contract
COPY engine engine
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM python AS operator
COPY --from=requirements /requirements /tmp/requirements
RUN pip install --constraint /tmp/constraints.txt "$(echo /tmp/requirements/*.whl)[operator]"
COPY --from=operator-source /wheel /tmp/wheel
RUN pip install --no-deps --force-reinstall /tmp/wheel/*.whl
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["kvsteward-operator"]

FROM python AS sidecar
COPY --from=requirements /requirements /tmp/requirements
RUN pip install --constraint /tmp/constraints.txt "$(echo /tmp/requirements/*.whl)[sidecar]"
COPY --from=sidecar-source /wheel /tmp/wheel
RUN pip install --no-deps --force-reinstall /tmp/wheel/*.whl
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["kvsteward-sidecar"]

FROM python AS engine
COPY --from=requirements /requirements /tmp/requirements
RUN pip install --constraint /tmp/constraints.txt "$(echo /tmp/requirements/*.whl)[engine]"
COPY --from=engine-source /wheel /tmp/wheel
RUN pip install --no-deps --force-reinstall /tmp/wheel/*.whl
# Passive: threads that wait for each other sleep. Spinning, they take the cores from those they wait for as soon as
# there are more threads than cores: ten times slower with two pods on two cores.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
USER 65532:65532
ENTRYPOINT ["kvsteward-engine"]
