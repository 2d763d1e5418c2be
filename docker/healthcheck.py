"""Exit 0 if the URL given answers 200, 1 with the reason on stderr otherwise. The image has no curl."""

import sys
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1], timeout=4).close()  # raises for 503
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
