"""Download pip's wheel from the package index with the standard library alone.

Needed in one case only: a Python without ensurepip (Debian without python3-venv) and therefore
without any pip to ask. Uses the index, certificate and proxy that pip itself would use, from
pip's environment variables and configuration files, and checks the wheel's sha256.
"""

import base64
import configparser
import hashlib
import html.parser
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request

DEFAULT_INDEX = "https://pypi.org/simple"


class FetchError(Exception):
    """The wheel could not be had; the message says where it was looked for."""


def config_files():
    """pip's configuration files, weakest first, as pip documents them."""
    explicit = os.environ.get("PIP_CONFIG_FILE")
    if explicit == os.devnull:
        return []
    home = os.path.expanduser("~")
    folders = os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    files = [os.path.join(folder, "pip", "pip.conf") for folder in folders if folder]
    files.append("/etc/pip.conf")
    files.append(os.path.join(home, ".pip", "pip.conf"))
    config_home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    files.append(os.path.join(config_home, "pip", "pip.conf"))
    if explicit:
        files.append(explicit)
    return files


def setting(name, default=None):
    """One of pip's options: ``PIP_NAME`` from the environment, else from its files."""
    from_environment = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if from_environment:
        return from_environment
    value = default
    parser = configparser.RawConfigParser()
    for path in config_files():
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            continue
    for section in ("global", "install"):
        if parser.has_option(section, name):
            value = parser.get(section, name)
    return value


def indexes():
    """Index addresses in pip's order."""
    extra = (setting("extra-index-url") or "").split()
    return [setting("index-url", DEFAULT_INDEX).strip(), *extra]


class _Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links = []

    def handle_starttag(self, tag, attrs):
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.links.append(href)


def wheel_link(page, page_url, version):
    """Address and sha256 (or None) of pip's wheel on an index page, or None if it isn't there."""
    parser = _Links()
    parser.feed(page)
    wanted = f"pip-{version}-py3-none-any.whl"
    for href in parser.links:
        address, _, fragment = urllib.parse.urljoin(page_url, href).partition("#")
        if urllib.parse.unquote(address.rsplit("/", 1)[-1]) == wanted:
            algorithm, _, value = fragment.partition("=")
            return address, value if algorithm == "sha256" else None
    return None


def get(address):
    """Bytes and final address (after redirects)."""
    parts = urllib.parse.urlsplit(address)
    headers = {"User-Agent": "hvd-greco-setup", "Accept": "text/html, */*"}
    if parts.username:
        # urllib does not take user:password@ from an address; pip's users write it so.
        user, password = map(urllib.parse.unquote, (parts.username, parts.password or ""))
        words = f"{user}:{password}"
        headers["Authorization"] = "Basic " + base64.b64encode(words.encode()).decode()
        host = parts.netloc.rsplit("@", 1)[1]
        address = urllib.parse.urlunsplit(parts._replace(netloc=host))
    certificate = setting("cert")
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    handlers = [urllib.request.HTTPSHandler(context=context)]
    proxy = setting("proxy")
    if proxy:
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    opener = urllib.request.build_opener(*handlers)
    timeout = float(setting("timeout") or setting("default-timeout") or 60)
    with opener.open(urllib.request.Request(address, headers=headers), timeout=timeout) as answer:
        return answer.read(), answer.geturl()


def download(version, folder):
    """Path of ``pip-VERSION-py3-none-any.whl``, downloaded into ``folder`` and checked.

    Raises:
        FetchError: no index has it, or what came is damaged.
    """
    tried = []
    for index in indexes():
        page_url = index.rstrip("/") + "/pip/"
        try:
            if page_url.startswith("file:"):
                page_url += "index.html"
            page, page_url = get(page_url)
            link = wheel_link(page.decode("utf-8", "replace"), page_url, version)
            if link is None:
                tried.append(f"{page_url}: no wheel of pip {version}")
                continue
            address, expected = link
            content, _ = get(address)
        except (OSError, ValueError, urllib.error.URLError) as error:
            tried.append(f"{page_url}: {error}")
            continue
        actual = hashlib.sha256(content).hexdigest()
        if expected and actual != expected:
            raise FetchError(f"{address} has sha256 {actual}, but the index says {expected}")
        path = os.path.join(folder, f"pip-{version}-py3-none-any.whl")
        with open(path, "wb") as handle:
            handle.write(content)
        return path
    raise FetchError("; ".join(tried))
